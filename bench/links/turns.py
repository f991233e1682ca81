"""Calls of ranks that are far apart, which begin on all of them at one instant, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from pycomm.bench.common.timing import in_turns


def begin(_: object = None) -> None:
    """Wait for an instant that rank 0 chooses. The nodes of a lab share one clock.

    A barrier would release ranks half a round trip apart. A rank that hears of the instant too late
    begins later, and the others wait for it.
    """
    before = time.monotonic()
    dist.barrier()
    lead = 0.25 + 2 * (time.monotonic() - before)  # one packet may be lost and repeated
    instant = torch.tensor([time.monotonic() + lead], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, instant.item() - time.monotonic()))


def slowest(calls: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each call on the slowest rank, `count` of each. Collective."""
    found = {}
    for name, samples in in_turns(calls, count, settle=0, before=begin).items():
        most = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = most.tolist()
    return found
