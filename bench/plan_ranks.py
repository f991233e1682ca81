"""What the ranks of validate_plan.py do: all-reduces, or training steps, of every codec in turns.

Rank 0 writes one JSON object per case to a file.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pycomm.communicator import Communicator
from pycomm.env import env
from pycomm.plan.codecs import CODINGS

BUDGET = 1.5  # seconds of one case, but for its fewest calls
FEWEST, MOST = 2, 20
PAUSE = 0.03  # before each call: a link's token bucket is full then, as it is after computing


def all_reduces(folder: str, sizes: Sequence[int], codecs: Sequence[str], log: str) -> None:
    """Median seconds of all-reduces, of the slowest rank."""
    with Communicator.from_env(folder, transport="tcp", timeout=300) as group:
        for size in sizes:
            source = np.random.default_rng(group.rank).standard_normal(size // 4, dtype=np.float32)
            data = np.empty_like(source)
            for codec in codecs:
                samples: list[float] = []
                count = FEWEST
                while len(samples) <= count:  # the first call warms up, and says how many fit
                    data[:] = source
                    time.sleep(PAUSE)
                    group.barrier()
                    begin = time.perf_counter()
                    if codec == "none":
                        group.all_reduce(data)
                    else:
                        group.all_reduce_coded(data, CODINGS[codec].spec)
                    samples.append(time.perf_counter() - begin)
                    if len(samples) == 1:
                        slowest = np.array(samples)
                        group.all_reduce(slowest, "max")
                        count = max(FEWEST, min(MOST, int(BUDGET / slowest[0])))
                slowest = np.array(samples[1:])
                group.all_reduce(slowest, "max")
                if group.rank == 0:
                    write(log, size=size, codec=codec, seconds=statistics.median(slowest.tolist()))


def steps(codecs: Sequence[str], log: str, count: int = 6) -> None:
    """Median seconds of a step of the demo's training with each codec, in one set of processes."""
    import torch
    import torch.distributed as dist

    from pycomm.bench.methods import Method
    from pycomm.bench.training import Config, Transformer, batches, loss_of, standard_library

    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    config = Config()
    torch.manual_seed(0)
    net = Transformer(config)
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate)
    data = batches(standard_library()[0], config, dist.get_rank(), dist.get_world_size())
    for codec in codecs:
        wrapped = Method("", codec="" if codec == "none" else codec).wrap(net, sync=False)
        samples = []
        for _ in range(3 + count):  # DDP makes new buckets in the first
            begin = time.perf_counter()
            loss_of(wrapped, next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
            samples.append(time.perf_counter() - begin)
        slowest = torch.tensor(samples[3:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            write(log, codec=codec, seconds=statistics.median(slowest.tolist()))
    dist.destroy_process_group()


def alone(log: str, count: int = 30) -> None:
    """The parts of a step under DDP of one rank, while the other cores do the same."""
    import torch
    import torch.distributed as dist

    from pycomm.bench.methods import Method
    from pycomm.bench.training import Config, Transformer, batches, loss_of, standard_library

    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    config = Config()
    torch.manual_seed(0)
    net = Transformer(config)
    wrapped = Method("").wrap(net, mine, sync=False)
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate)
    data = batches(standard_library()[0], config, 0, 1)
    parts: list[list[float]] = [[], [], []]
    for _ in range(3 + count):
        clock = [time.perf_counter()]
        loss = loss_of(wrapped, next(data))
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        clock.append(time.perf_counter())
        for i, part in enumerate(parts):
            part.append(clock[i + 1] - clock[i])
    forward, backward, update = (statistics.median(part[3:]) for part in parts)
    shapes = [list(p.shape) for p in net.parameters()]
    if env().rank == 0:
        write(log, forward=forward, backward=backward, optimizer=update, shapes=shapes)
    dist.destroy_process_group()


def write(log: str, **record: Any) -> None:
    with Path(log).open("a") as file:
        print(json.dumps(record), file=file, flush=True)


def main(words: str) -> int:
    """Run what validate_plan.py asks for, as JSON."""
    asked = json.loads(words)
    kind = asked.pop("kind")
    {"all_reduces": all_reduces, "steps": steps, "alone": alone}[kind](**asked)
    return 0
