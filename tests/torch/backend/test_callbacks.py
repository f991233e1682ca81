"""Callbacks: their exceptions are kept apart, and what they wait for."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
import pycomm.trace
from pycomm import backend, straggler
from tests.torch.harness import check_sum
from tests.torch.pool import on_ranks

# ------------------------------------------------------------------ raising


@on_ranks(2)
def test_what_a_callback_raises_stays_in_its_future(rank, size):
    def fail(_):
        raise KeyError("a mistake in this callback")

    for make in (
        lambda: dist.all_reduce(torch.ones(3), async_op=True),
        lambda: dist.isend(torch.ones(3), 1) if rank == 0 else dist.irecv(torch.ones(3), 0),
        lambda: dist.barrier(async_op=True),
    ):
        work = make()
        future = work.get_future()
        future.add_done_callback(fail)
        chained = future.then(fail)
        after = chained.then(fail)
        work.wait()
        for failed in (chained, after):
            with pytest.raises(Exception, match="a mistake in this callback"):
                failed.wait()
        assert work.is_success()
    check_sum()


# ------------------------------------------------------------------ waiting


@on_ranks(2)
def test_a_callback_must_not_wait_for_operations_behind_its_own(rank, size):
    first, last = torch.ones(2_000_000), torch.ones(3)
    gate = threading.Event()
    said: list[str] = []

    def callback(_):
        if threading.current_thread() is threading.main_thread():
            return  # it was done before it had this callback
        gate.wait(20)
        with pytest.raises(pycomm.Error, match=r"cannot be waited for here: .*then\(\)"):
            later.wait()
        said.append("told")

    after = dist.all_reduce(first, async_op=True).get_future().then(callback)
    later = dist.all_reduce(last, async_op=True)
    gate.set()
    after.wait()
    try:
        later.wait()
        error = ""
    except pycomm.Error as raised:
        error = str(raised)
    # On all ranks, though one may have run its callback at once.
    assert "in a callback on the thread that would complete it" in error or said == [] == [*error]


@on_ranks(2)
def test_what_a_callback_issues_comes_before_what_is_queued(rank, size):
    """On rank 1 the next operation is queued when the callback runs, on rank 0 it is not."""
    gate, issued = threading.Event(), threading.Event()
    a, b, c = (torch.ones(numel) for numel in (1_000_000, 3, 5))
    own: list[Any] = []

    def callback(_):
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            gate.wait(20)
        own.append(dist.all_reduce(b, async_op=True))
        issued.set()

    first = dist.all_reduce(a, async_op=True)
    after = first.get_future().then(callback)
    if rank == 0:
        assert issued.wait(20)
    last = dist.all_reduce(c, async_op=True)
    gate.set()
    after.wait()
    for work in (*own, last):
        work.wait()
    assert all(x.eq(size).all() for x in (a, b, c))


@on_ranks(2)
def test_callbacks_that_wait_for_each_others_groups_end_in_time(rank, size):
    """Each group's callback waits for an operation that the other has queued behind its own."""
    groups = [dist.new_group(backend="pycomm", timeout=timedelta(seconds=3)) for _ in range(2)]
    queued = threading.Event()
    said: list[str] = []
    later: list[Any] = []

    def callback(number):
        def wait(_):
            if threading.current_thread() is threading.main_thread():
                return said.append("early")  # it was done before it had this callback
            queued.wait(20)
            try:
                later[1 - number].wait()
            except pycomm.Timeout as error:
                said.append(str(error))

        return wait

    large = [torch.ones(2_000_000) for _ in groups]
    firsts = [
        dist.all_reduce(x, group=g, async_op=True) for x, g in zip(large, groups, strict=True)
    ]
    futures = [first.get_future().then(callback(i)) for i, first in enumerate(firsts)]
    later += [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in groups]
    queued.set()
    for future in futures:
        future.wait()
    assert "early" in said or any("was not done after a wait of 3000 ms" in one for one in said)
    for work in later:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)
    check_sum()


@on_ranks(2, timeout=30)
def test_a_callback_may_wait_for_its_own_operation(rank, size):
    peer = 1 - rank
    for make in (
        lambda: dist.all_reduce(torch.ones(3), async_op=True),
        lambda: dist.isend(torch.ones(3), peer) if rank == 0 else dist.irecv(torch.ones(3), peer),
        lambda: dist.irecv(torch.ones(3), peer) if rank == 0 else dist.isend(torch.ones(3), peer),
    ):
        said: list[Any] = []
        work = make()

        def callback(_, work=work, said=said):
            said.append(work.wait())
            said.append(work.is_completed())

        work.get_future().then(callback).wait()
        assert said == [True, True]
    check_sum()


@on_ranks(2)
def test_a_callback_waits_for_another_threads_message(rank, size):
    """Two threads wait for a receive. The one that comes second finds it done but not complete,
    since the first is still copying to every other place of the tensor."""
    numel = 2_000_000
    for i in range(5):
        if rank == 0:
            dist.barrier()
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)
            dist.send(torch.full((numel,), float(i)), 1)
            continue
        x = torch.full((numel, 2), -1.0)[:, 0]
        received = dist.irecv(x, 0)
        arrived = received.get_future()  # a thread of the group waits for it
        dist.barrier()
        sum_ = dist.all_reduce(torch.ones(1), async_op=True)
        waited = sum_.get_future().then(lambda _, work=received: work.wait())
        waited.wait()  # raises what the callback has raised
        arrived.wait()
        assert torch.all(x == i)
    check_sum()


@on_ranks(2)
def test_operations_that_were_issued_as_one_have_no_future(rank, size):
    call = dist.isend if rank == 0 else dist.irecv
    (work,) = dist.batch_isend_irecv([dist.P2POp(call, x, 1 - rank) for x in torch.ones(2, 10)])
    with pytest.raises(pycomm.Error, match=f"rank {rank}: operations that were issued as one have"):
        work.get_future()
    work.wait()


# -------------------------------------------------------------------------------------------- trace
# Traces of queued operations: they are recorded when issued, and agree with the errors.


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
    assert backend.find().get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT


# ----------------------------------------------------------------------------------------- health
# The straggler monitor is on by default: the first rank's standard error names a slow rank.


def rank_1_is_named(results: list[list[str]]) -> None:
    first, other = results
    assert other == []
    (line,) = first
    assert line.startswith("rank 1 (")
    assert "it computes for" in line


@on_ranks(2, then=rank_1_is_named, backend=None)
def test_a_slow_rank_is_named_unasked(rank, size, store):
    lines: list[str] = []
    straggler._monitor = straggler.StragglerMonitor(1.0, lines.append)
    limit = timedelta(seconds=30)  # so that a call that hangs tells its name
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, timeout=limit)
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
        straggler._monitor.close()
        straggler._monitor = None
    return lines
