"""Process groups: barriers that name ranks, timeouts, hooks, subgroups, and shutdown."""

from __future__ import annotations

import copy
import datetime
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import backend
from pycomm._build import load_c10d
from tests.soak.held import held
from tests.torch.harness import check_sum
from tests.torch.interpreter import run, run_ranks
from tests.torch.pool import on_ranks

CPU = torch.device("cpu")
ErrorType = torch._C._distributed_c10d.ErrorType


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


# ------------------------------------------------------------------ monitored barrier


@on_ranks(4)
def test_monitored_barrier_names_the_first_rank_that_is_missing(rank, size):
    group = dist.group.WORLD
    for wait_all_ranks in (False, True):
        dist.monitored_barrier(timeout=seconds(20), wait_all_ranks=wait_all_ranks)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(pycomm.Timeout, match="Rank 1 failed to pass monitoredBarrier in 300"):
            dist.monitored_barrier(group, seconds(0.3))
    elif rank == 3:  # rank 0 reports which rank is missing
        with pytest.raises(RuntimeError, match=r"Rank 3 successfully reached.* Rank 1 failed"):
            dist.monitored_barrier(group, seconds(0.3))
    else:
        group.rank()  # ranks 1 and 2 do not join
    assert time.monotonic() - start < 2
    dist.barrier()  # the group is still usable


@on_ranks(3)
def test_monitored_barrier_names_all_ranks_that_are_missing(rank, size):
    if rank == 0:
        with pytest.raises(pycomm.Timeout, match="Ranks 1, 2 failed to pass monitoredBarrier"):
            dist.monitored_barrier(None, seconds(0.2), wait_all_ranks=True)
        with pytest.raises(pycomm.Timeout, match="Rank 0 timed out in monitoredBarrier"):
            dist.group.WORLD.monitored_barrier(seconds(0))
    dist.barrier()


# ------------------------------------------------------------------ timeouts


@on_ranks(2)
def test_a_timed_out_wait_names_the_operation(rank, size):
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 0:
        with pytest.raises(
            pycomm.Timeout, match=r"(?s)rank 0: all_reduce #1 timed out.* 100 ms.*rank 1 is missing"
        ):
            work.wait(seconds(0.1))
        assert not work.is_completed()
        dist.send(torch.ones(1), 1)
    work.wait()  # a short wait has done no harm
    check_sum()


TIMEOUTS = """
import torch.distributed as dist, pycomm, pycomm.backend
from datetime import timedelta
def timeout(**given):
    dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1, **given)
    seconds = pycomm.backend.find().options._timeout.total_seconds()
    dist.destroy_process_group()
    return int(seconds)
options = pycomm.Options(timeout=timedelta(seconds=7))
print(timeout(), timeout(timeout=timedelta(seconds=9)), timeout(pg_options=options))
"""


@pytest.mark.parametrize(("variable", "want"), [("", "1800 9 7"), ("11", "11 9 7")])
def test_the_first_timeout_that_is_named_wins(monkeypatch, variable, want):
    """The order is: an argument, then pycomm.Options, then PYCOMM_TIMEOUT, then torch's default."""
    monkeypatch.delenv("PYCOMM_TIMEOUT", raising=False)
    if variable:
        monkeypatch.setenv("PYCOMM_TIMEOUT", variable)
    done = run("-c", TIMEOUTS, autoload=True)
    assert done.stdout.strip() == want, done.stderr


@on_ranks(2, backend=None)
def test_the_longest_timeout_waits(rank, size, store):
    """timedelta.max means no timeout, for groups and for waits."""
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=size, timeout=timedelta.max
    )
    try:
        x = torch.ones(5)
        work = dist.all_reduce(x, async_op=True)
        assert work.wait(timedelta.max)
        assert torch.equal(x, torch.full((5,), float(size)))
        if rank == 0:
            assert dist.irecv(x, 1).wait(timedelta.max)
        else:
            dist.send(x, 0)
        dist.group.WORLD.monitored_barrier(timedelta.max)
    finally:
        dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_a_group_without_time_is_refused(rank, size, store):
    def use(seconds: int) -> None:
        timeout = timedelta(seconds=seconds)
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, timeout=timeout)
        dist.all_reduce(torch.ones(1))

    for seconds in (-1, 0):
        with pytest.raises(RuntimeError, match=r"the timeout of the group is .* ms; give one"):
            use(seconds)
        if dist.is_initialized():
            dist.destroy_process_group()


# ------------------------------------------------------------------ hooks, timing, state


@on_ranks(2)
def test_pending_works_include_hooks(rank, size):
    group = dist.group.WORLD
    seen: list[Any] = []

    def hook(info: Any) -> None:
        time.sleep(0.2)  # the operation is complete meanwhile
        seen.append(info.op_type)
        group._wait_for_pending_works()  # does not wait for itself

    group._register_on_completion_hook(hook)
    x = torch.ones(100)
    for _ in range(3):
        request = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        if rank == 0:
            request.wait()
        else:
            time.sleep(0.05)  # the group's thread has begun with the hook
        group._wait_for_pending_works()
    assert len(seen) == 3, seen


@on_ranks(2)
def test_pending_works_include_receives_that_were_dropped(rank, size):
    group = dist.group.WORLD
    grid = torch.zeros(3, 40)
    for column in range(40):
        if rank == 0:
            dist.send(torch.full((3,), 1.0 + column), 1)
        else:
            dist.irecv(grid[:, column], 0)  # nobody has the handle
    dist.barrier()
    group._wait_for_pending_works()
    if rank == 1:
        assert grid.tolist() == [[1.0 + column for column in range(40)]] * 3


@on_ranks(2)
def test_completion_hook_sees_every_operation(rank, size):
    group = dist.group.WORLD
    work = group.allreduce([torch.ones(1)])
    work.wait()
    with pytest.raises(RuntimeError, match="not timed"):
        work._get_duration()
    seen: list[Any] = []
    group._register_on_completion_hook(seen.append)
    assert group._has_hooks()
    with pytest.raises(RuntimeError, match="has a completion hook already"):
        group._register_on_completion_hook(seen.append)
    x = torch.ones(200_000)  # takes longer than a microsecond, the unit of durations
    dist.all_reduce(x)
    dist.broadcast(x.clone(), 0, async_op=True)
    request = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    group._wait_for_pending_works()
    assert request.is_completed()
    found = {str(info.op_type).removeprefix("OpType."): info.seq for info in seen}
    # Point to point is counted separately, and may end before a collective that was issued earlier.
    assert found == {"ALLREDUCE": 2, "BROADCAST": 3, "SEND" if rank == 0 else "RECV": 1}, found
    assert len(seen) == 3
    for info in seen:
        assert datetime.timedelta(0) < info.active_duration < seconds(20)
        assert info.time_finished - info.time_started >= datetime.timedelta(0)


@on_ranks(2)
def test_work_tells_all_about_itself(rank, size):
    dist.group.WORLD._enable_collectives_timing()
    x = torch.ones(3)
    for asynchronous in (False, True):
        options = dist.AllreduceOptions()
        options.asyncOp = asynchronous
        work = dist.group.WORLD.allreduce([x], options)
        assert work.get_future_result().wait() == 0
        assert work.get_future().wait()[0] is x
        work.synchronize()
        work.block_current_stream()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert 0 < work._get_duration() < 20000
        assert work.result()[0] is x
    assert backend.find()._get_sequence_number_for_group() == 2


@on_ranks(2)
def test_failed_work_says_how(rank, size):
    x = torch.ones(3 + rank)
    work = dist.all_reduce(x, async_op=True)
    result = work.get_future_result()
    assert result.wait() == 2  # WorkResult.COMM_ERROR
    assert not work.is_success()
    with pytest.raises(pycomm.WireMismatch):
        work.wait()
    assert backend.find().get_error() == ErrorType.COMM_ERROR
    dist.group.WORLD.shutdown()
    assert backend.find().get_error() == ErrorType.COMM_ERROR


# ------------------------------------------------------------------ groups made from groups


@on_ranks(4)
def test_split_group(rank, size):
    before = held("self")["mappings"]
    native = backend.find()
    assert native.supports_splitting
    options = copy.deepcopy(native.options)
    options.group_name = f"half {rank % 2}"
    ranks = [r for r in range(size) if r % 2 == rank % 2]
    half = dist.group.WORLD.split_group(ranks, opts=options, group_name=f"half {rank % 2}")
    assert half.size() == len(ranks)
    x = torch.tensor([float(rank)])
    half.allreduce([x]).wait()
    assert x.item() == sum(ranks)
    again = dist.group.WORLD.split_group(ranks)
    twin = dist.group.WORLD.split_group(ranks)  # torch calls it by the same name
    for group in (half, again, twin):
        group.shutdown()
    # Torch had asked for one for the CPU and one for CUDA.
    assert held("self")["mappings"] == before
    assert native.perform_nocolor_split(CPU) is None
    native.eager_connect_single_device(torch.device("cpu:0"))


@on_ranks(2)
def test_a_split_group_has_its_parents_timeout(rank, size):
    world = dist.new_group(backend="pycomm", timeout=seconds(77))
    # Torch's default, half an hour, names none.
    for timeout, want in ((seconds(1800), 77), (seconds(5), 5)):
        given = pycomm.Options(timeout=timeout)
        given.group_name = f"split {want}"
        half = world.split_group([rank], opts=given, group_name=given.group_name)
        assert backend.find(half).options._timeout == seconds(want)
        half.shutdown()


@on_ranks(2)
def test_what_a_group_holds_goes_with_it(rank, size):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [server.port]
    dist.broadcast_object_list(port)  # both use rank 0's port, which it closes at any time
    before = held("self")["sockets"]
    for way in ("shut down", "dropped"):
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
        group = load_c10d().Backend(store, rank, size, pycomm.Options(transport="shm"), way)
        assert rank == 0 or held("self")["sockets"] > before
        if way == "shut down":
            group.shutdown()
        del group, store
        assert rank == 0 or held("self")["sockets"] == before, way
    dist.barrier()


@on_ranks(2)
def test_merge_remote_group(rank, size):
    """Two groups of one rank each are merged into one of two."""
    parts = [dist.new_group([r]) for r in range(size)]
    store = dist.PrefixStore("merged", dist.group.WORLD.get_group_store())
    merged = parts[rank].merge_remote_group(store, size, seconds(20), group_name="both")
    assert merged.size() == size
    x = torch.ones(3)
    merged.allreduce([x]).wait()
    assert torch.equal(x, torch.full((3,), float(size)))


@on_ranks(3)
@pytest.mark.parametrize("how", ["healthy", "abort", "after an error"])
def test_shrink_group(rank, size, how):
    if rank == 1:
        if how == "after an error":
            dist.group.WORLD.abort()
        else:
            time.sleep(0.5)
        return
    if how == "after an error":
        with pytest.raises(pycomm.Error, match="rank 1"):
            dist.all_reduce(torch.ones(1))
        assert backend.find().get_error() != ErrorType.SUCCESS
    flags = dist.distributed_c10d.SHRINK_ABORT if how == "abort" else 0
    group = dist.shrink_group([1], shrink_flags=flags)
    assert (dist.get_world_size(), dist.get_rank()) == (2, rank // 2)
    assert dist.get_process_group_ranks(group) == [0, 2]
    assert backend.find().options.global_ranks_in_group == [0, 2]
    check_sum(group)
    check_sum()  # it is the default group now


@on_ranks(4)
def test_shrink_a_subgroup(rank, size):
    part = dist.new_group([1, 2, 3])
    if rank in (0, 2):
        time.sleep(0.5)
        return
    group = dist.shrink_group([1], group=part)  # by its number in the subgroup
    shrunk = backend.find(group)
    assert shrunk.options.global_ranks_in_group == [1, 3]
    x = torch.ones(3)
    shrunk.allreduce([x]).wait()
    assert x.tolist() == [2.0] * 3


# ------------------------------------------------------------------ shutdown


@on_ranks(2)
def test_abort_and_shutdown_from_several_threads(rank, size):
    group = dist.group.WORLD
    work = dist.all_reduce(torch.ones(10), async_op=True) if rank == 0 else None
    start = time.monotonic()
    threads = [threading.Thread(target=end) for end in (group.abort, group.abort, group.shutdown)]
    if rank == 0:
        time.sleep(0.2)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(pycomm.Error, match="abort"):
            work.wait()
        group.abort()  # without effect after the end
        group.shutdown()
        assert time.monotonic() - start < 5
        with pytest.raises(RuntimeError, match="shut down"):
            dist.barrier()
    else:
        time.sleep(1)


@on_ranks(2)
def test_shutdown_inside_a_callback(rank, size):
    """The last operation's callback ends the group on the group's own thread."""
    group = dist.new_group()
    done = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
    done.then(lambda _: group.shutdown()).wait()
    with pytest.raises(RuntimeError, match="shut down"):
        dist.barrier(group=group)
    dist.barrier()


@on_ranks(2)
def test_receive_that_outlives_its_group_is_an_error(rank, size):
    group = dist.new_group()
    if rank == 0:
        request = dist.irecv(torch.empty(3), 1, group=group)
        dist.destroy_process_group(group)
        with pytest.raises(pycomm.Error, match=r"rank 0: recv .* closed"):
            request.wait()
    dist.barrier()


# ------------------------------------------------------------------------ encryption


ENCRYPTED = """
import sys
import torch
import torch.distributed as dist

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=2)
x = torch.arange(100_000.0)
dist.all_reduce(x)
assert torch.equal(x, 2 * torch.arange(100_000.0))
print(dist.group.WORLD._get_backend(torch.device("cpu")).describe())
dist.destroy_process_group()
"""


def test_pycomm_tls_encrypts_what_torch_sends(tmp_path):
    variables = {"PYCOMM_TLS": "on", "PYCOMM_TRANSPORT": "tcp"}
    words = [str(tmp_path / "store")]
    for rank in run_ranks("-c", ENCRYPTED, words=words, variables=variables, autoload=True):
        assert "TLS 1.3" in rank.stdout, rank.stderr
        assert rank.returncode == 0
