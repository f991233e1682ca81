"""Training steps of the demo's model, which validate_plan.py predicts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pycomm.bench.planner.log import write
from pycomm.bench.training.corpora import standard_library
from pycomm.bench.training.methods import Method
from pycomm.bench.training.train import Config, Transformer, batches, loss_of

TURNS, STEPS = 4, 3  # per codec, and steps per turn
# Untimed warm-up steps: DDP makes new buckets first, and other models have used the caches.
WARM = 3, 1


class Trained:
    """The demo's model in DDP, and the times of its counted steps."""

    def __init__(self, codec: str, group: dist.ProcessGroup | None = None) -> None:
        torch.manual_seed(0)
        self.net = Transformer(Config())
        self.wrapped = Method("", codec="" if codec == "none" else codec).wrap(
            self.net, group, sync=False
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), Config().learning_rate)
        self.samples: list[list[float]] = []

    def fill(self, batch: torch.Tensor) -> None:
        """Fill Adam's second moments from a dense local gradient. A sparse one leaves zeros for
        many steps, and torch takes their square roots several times slower on a CPU."""
        with self.wrapped.no_sync():
            self.step(batch)

    def step(self, batch: torch.Tensor) -> list[float]:
        """Return the seconds of the forward pass, the backward pass and the optimizer."""
        clock = [time.perf_counter()]
        loss = loss_of(self.wrapped, batch)
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(clock)]

    def slowest(self) -> float:
        """Return the median seconds of a step, of the slowest rank."""
        seconds = torch.tensor(self.samples, dtype=torch.float64).sum(1)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return statistics.median(seconds.tolist())


def run(codecs: Sequence[str], log: str) -> None:
    """Measure training steps with each codec, in turns with ranks that do not communicate.

    The parts of a step of the latter add up to the slowest rank's time.
    """
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [dist.new_group([r]) for r in range(size)][rank]
    data = batches(standard_library()[0], Config(), rank, size)
    alone = Trained("none", mine)
    trained = {codec: Trained(codec) for codec in codecs}
    for one in (alone, *trained.values()):
        one.fill(next(data))
    for turn in range(TURNS):
        for one in (alone, *trained.values()):
            for i in range(WARM[turn > 0] + STEPS):
                if one is alone:
                    dist.barrier()
                seconds = one.step(next(data))
                if i >= WARM[turn > 0]:
                    one.samples.append(seconds)
    parts = [statistics.median(part) for part in zip(*alone.samples, strict=True)]
    factor = alone.slowest() / sum(parts)
    slowest = {codec: one.slowest() for codec, one in trained.items()}
    if rank == 0:
        names = ("forward", "backward", "optimizer")
        shapes = [list(p.shape) for p in alone.net.parameters()]
        measured = {name: factor * part for name, part in zip(names, parts, strict=True)}
        write(log, **measured, shapes=shapes)
        for codec in codecs:
            write(log, codec=codec, seconds=slowest[codec])
    dist.destroy_process_group()
