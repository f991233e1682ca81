"""Traces of queued operations: they are recorded when issued, and agree with the errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm.trace
from pycomm import backend


def entries() -> list[dict[str, Any]]:
    recording = pycomm.trace.collect(backend.find())[dist.get_rank()]
    assert recording["pg_config"].popitem()[1]["ranks"] == str(list(range(dist.get_world_size())))
    return recording["entries"]


def check_states(rank: int, size: int) -> None:
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


def test_a_queued_operation_is_scheduled_then_started_then_completed(pool):
    pool.run(check_states)


def check_texts(rank: int, size: int) -> None:
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


def test_a_timeout_is_told_alike_by_waits_futures_and_later_calls(pool):
    pool.run(check_texts, timeout=1)
