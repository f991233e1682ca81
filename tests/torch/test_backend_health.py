"""A slow rank is named on the first rank's standard error, and nobody has asked."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from pycomm.health import station


def slow_steps(rank: int, ranks: int, store: dist.Store) -> list[str]:
    lines: list[str] = []
    station._station = station.Station(1.0, lines.append)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=ranks)
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
        station._station.close()
        station._station = None
    return lines


def test_a_slow_rank_is_named_unasked(pool):
    first, other = pool.run(slow_steps, backend=None)
    assert other == []
    (line,) = first
    assert line.startswith("pycomm: rank 1 (")
    assert "it computes for" in line
