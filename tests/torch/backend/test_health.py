"""The straggler monitor is on by default: rank 0's standard error names a slow rank."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pycomm.straggler import monitor


def slow_steps(rank: int, ranks: int, store: dist.Store) -> list[str]:
    lines: list[str] = []
    monitor._monitor = monitor.StragglerMonitor(1.0, lines.append)
    limit = timedelta(seconds=30)  # so that a call that hangs tells its name
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        goes_on = torch.ones(1)
        end = time.monotonic() + 20
        while goes_on.item():
            time.sleep(0.02 if rank == 1 else 0.002)
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            goes_on.fill_(0.0 if lines or time.monotonic() > end else 1.0)
            work.wait()
            dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
    finally:
        dist.destroy_process_group()
        monitor._monitor.close()
        monitor._monitor = None
    return lines


def test_a_slow_rank_is_named_unasked(pool):
    first, other = pool.run(slow_steps, backend=None)
    assert other == []
    (line,) = first
    assert line.startswith("pycomm: rank 1 (")
    assert "it computes for" in line
