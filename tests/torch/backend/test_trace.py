"""Traces of queued operations: they are recorded when issued, and agree with the errors."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm.trace
from pycomm import backend
from pycomm.straggler import monitor
from tests.torch.pool import on_ranks


def entries() -> list[dict[str, Any]]:
    recording = pycomm.trace.collect(backend.find())[dist.get_rank()]
    assert recording["pg_config"].popitem()[1]["ranks"] == str(list(range(dist.get_world_size())))
    return recording["entries"]


@on_ranks(2)
def test_a_queued_operations_states_are_traced(rank, size):
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(2)]
    works.append(
        dist.group.WORLD._allgather_base(torch.ones(size * 3), torch.ones(3))
        if rank == 1
        else dist.all_gather_into_tensor(torch.ones(size * 3), torch.ones(3), async_op=True)
    )
    if rank == 0:
        time.sleep(0.1)
        found = entries()
        assert [e["state"] for e in found] == ["completed", "started", "scheduled", "scheduled"]
        assert [e["collective_seq_id"] for e in found] == [1, 2, 3, 4]
        assert [e["input_sizes"] for e in found] == [[[0]], [[5]], [[5]], [[3]]]
        assert found[3]["profiling_name"] == "gloo:all_gather"
        assert found[3]["output_sizes"] == [[3 * size]]
    for work in works:
        work.wait()
    found = entries()
    assert [e["state"] for e in found] == ["completed"] * 4
    assert [e["collective_seq_id"] for e in found] == [1, 2, 3, 4]
    for e in found:
        assert e["time_created_ns"] <= e["time_discovered_started_ns"]
    if rank == 0:  # it was issued long before it began
        assert found[2]["time_discovered_started_ns"] - found[2]["time_created_ns"] > 10**8


@on_ranks(2, timeout=1)
def test_a_timeout_is_told_alike_everywhere(rank, size):
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        return
    works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(2)]
    future = works[1].get_future()
    headline = "rank 0: all_reduce #2 (sum of 5 float32) did not end within the timeout of 1000 ms"
    table = (
        "  rank 1 is missing: in no operation, last completed barrier #1\n"
        "  rank 0 waits: in all_reduce #2 (sum of 5 float32), last completed barrier #1"
    )
    second = " (seen by rank 0 in all_reduce #3 (sum of 5 float32))"
    third = " (seen by rank 0 in barrier #4)"
    for wait, heard in (
        (works[0].wait, ""),
        (works[1].wait, second),
        (future.wait, second),
        (dist.barrier, third),
    ):
        with pytest.raises(pycomm.Timeout) as caught:
            wait()
        assert str(caught.value) == f"{headline}{heard}\n{table}"
    assert [work.get_future_result().wait() for work in works] == [1, 1]  # WorkResult.TIMEOUT


# ----------------------------------------------------------------------------------------- health
# The straggler monitor is on by default: rank 0's standard error names a slow rank.


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
    assert line.startswith("rank 1 (")
    assert "it computes for" in line
