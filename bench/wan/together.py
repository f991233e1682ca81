"""Calls that begin on all ranks at the same instant.

The nodes of a lab share one clock, so ranks can agree on an instant: a call then takes no time for
another rank that leaves a barrier half a round trip later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def begin() -> float:
    """Wait for an instant that rank 0 chooses; returns it, by `time.monotonic`.

    A rank that hears of it too late begins later, and its call seems to take longer.
    """
    before = time.monotonic()
    dist.barrier()
    lead = 0.25 + 2 * (time.monotonic() - before)  # one packet may be lost and repeated
    instant = torch.tensor([time.monotonic() + lead], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, instant.item() - time.monotonic()))
    return float(instant.item())


def timed(call: Callable[[], object]) -> float:
    """Return the seconds from the common begin of a call to its end on the last rank."""
    start = begin()
    call()
    took = torch.tensor([time.monotonic() - start])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took.item())
