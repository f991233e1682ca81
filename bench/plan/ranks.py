"""Ranks of `python -m pycomm.bench plan`: all-reduces or training steps of all codecs in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import pycomm
from pycomm.bench.common.timing import calls_within, in_turns
from pycomm.communicator import Communicator, Piece
from pycomm.plan.codecs import CODINGS, Coding

BUDGET = 1.5  # seconds of the slowest codec at one size
FEWEST, MOST = 1, 5  # timed calls of a codec in a round
ROUNDS = 4  # so that a slow minute affects all sizes
PAUSE = 0.03  # before each call, so that a link's token bucket is full, as it is after computing
TURNS, STEPS = 4, 3  # turns of a codec's training, and timed steps in each
WARM = 3  # untimed steps: DDP makes new buckets


def piece(coding: Coding, residual: np.ndarray[Any, Any]) -> Piece:
    """Return a buffer as `pycomm.compress` codes it: owners keep residuals of codecs with feedback.

    They decide the algorithm between far ranks.
    """
    owed = coding.feedback and coding.combine == "recode"
    codec = pycomm.codec(coding.spec)
    return Piece(residual.size, codec, owner_residual=residual if owed else None)


def all_reduces(sizes: Sequence[int], codecs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the median seconds of all-reduces, of the slowest rank."""
    with Communicator.from_env(transport="tcp", timeout=300) as group:
        source = np.random.default_rng(group.rank).standard_normal(max(sizes) // 4, np.float32)
        buffer, residual = np.empty_like(source), np.zeros_like(source)

        def rest(_: object) -> None:
            buffer[:] = source
            time.sleep(PAUSE)
            group.barrier()

        def call(size: int, codec: str) -> Any:
            data = buffer[: size // 4]
            if codec == "none":
                return lambda: group.all_reduce(data)
            pieces = [piece(CODINGS[codec], residual[: size // 4])]
            return lambda: group.all_reduce_coded(data, pieces)

        def slowest(samples: Sequence[float]) -> list[float]:
            times = np.array(samples)
            group.all_reduce(times, "max")
            return [float(seconds) for seconds in times]

        calls = {size: {codec: call(size, codec) for codec in codecs} for size in sizes}
        found: dict[tuple[int, str], list[float]] = {}
        counts = {}
        for size in sizes:
            first = in_turns(calls[size], 1, settle=0, before=rest)
            most = max(slowest([first[codec][0] for codec in codecs]))
            counts[size] = calls_within(BUDGET / ROUNDS, most, FEWEST, MOST)
        for _, size in itertools.product(range(ROUNDS), sizes):
            # The first call of a turn finds buffers of another size in the caches.
            samples = in_turns(calls[size], counts[size] + 1, settle=0, before=rest)
            for codec in codecs:
                found.setdefault((size, codec), []).extend(slowest(samples[codec][1:]))
        for (size, codec), times in found.items():
            yield {"size": size, "codec": codec, "seconds": statistics.median(times)}


def steps(codecs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield training steps with each codec, in turns with ranks that do not communicate.

    The parts of a step of the latter come first; they add up to the slowest rank's time.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from pycomm.bench.step.rank import Clock, Stepper
    from pycomm.bench.training.methods import Method
    from pycomm.bench.training.train import Config, Transformer

    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [dist.new_group([r]) for r in range(size)][rank]
    clock = Clock(torch.device("cpu"))

    def stepper(codec: str, group: dist.ProcessGroup | None = None) -> Stepper:
        torch.manual_seed(0)
        method = Method("", codec="" if codec == "none" else codec)
        made = Stepper(Config(), method, Transformer(Config()), group, clock, 0.0)
        # Adam's second moments begin with a dense local gradient. A sparse one leaves zeros for
        # many steps, and torch takes their square roots several times slower on a CPU.
        assert isinstance(made.model, DistributedDataParallel)
        with made.model.no_sync():
            made.step()
        return made

    alone = stepper("none", mine)
    trained = {"alone": alone} | {codec: stepper(codec) for codec in codecs}
    calls = {name: one.step for name, one in trained.items()}

    def begin(name: str) -> None:
        if name == "alone":
            dist.barrier()

    in_turns(calls, WARM, turn=WARM, settle=0, before=begin)
    samples = in_turns(calls, TURNS * STEPS, turn=STEPS, before=begin)
    middle = {}
    for name, times in samples.items():
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        middle[name] = statistics.median(slowest.tolist())
    dist.barrier()
    parts = alone.parts()
    shapes = [list(p.shape) for p in alone.model.parameters()]
    scale = middle["alone"] / sum(parts.values())
    yield {**{name: scale * part for name, part in parts.items()}, "shapes": shapes}
    for codec in codecs:
        yield {"codec": codec, "seconds": middle[codec]}
    dist.destroy_process_group()
