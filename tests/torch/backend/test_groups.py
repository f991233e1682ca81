"""Process groups: barriers that name ranks, timeouts, subgroups, shutdown, far stores."""

from __future__ import annotations

import copy
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

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
from tests.transports.proxy import Proxy

CPU = torch.device("cpu")
ErrorType = torch._C._distributed_c10d.ErrorType


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


# ------------------------------------------------------------------ monitored barrier


@on_ranks(4)
def test_monitored_barrier_names_who_is_missing(rank, size):
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
    if rank == 0:
        with pytest.raises(pycomm.Timeout, match="Ranks 1, 2, 3 failed to pass monitoredBarrier"):
            dist.monitored_barrier(None, seconds(0.2), wait_all_ranks=True)
        with pytest.raises(pycomm.Timeout, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(seconds(0))
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
    x = torch.ones(5)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait(timedelta.max)
    assert torch.equal(x, torch.full((5,), float(size)))
    if rank == 0:
        assert dist.irecv(x, 1).wait(timedelta.max)
    else:
        dist.send(x, 0)
    dist.group.WORLD.monitored_barrier(timedelta.max)


@on_ranks(2, backend=None)
def test_a_group_without_time_is_refused(rank, size, store):
    def use(limit: timedelta) -> None:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, timeout=limit)
        dist.all_reduce(torch.ones(1))

    for limit in (seconds(-1), seconds(0)):
        with pytest.raises(RuntimeError, match=r"the timeout of the group is .* ms; give one"):
            use(limit)
        if dist.is_initialized():
            dist.destroy_process_group()


# ------------------------------------------------------------------ state


@on_ranks(2)
def test_dropped_receives_get_their_data(rank, size):
    grid = torch.zeros(3, 40)
    for column in range(40):
        if rank == 0:
            dist.send(torch.full((3,), 1.0 + column), 1)
        else:
            dist.irecv(grid[:, column], 0)  # nobody has the handle
    dist.barrier()
    want = [[1.0 + column for column in range(40)]] * 3
    end = time.monotonic() + 20
    while rank == 1 and grid.tolist() != want:  # a thread of the group may still be about to copy
        assert time.monotonic() < end
        time.sleep(0.001)


@on_ranks(2)
def test_work_tells_all_about_itself(rank, size):
    x = torch.ones(3)
    for asynchronous in (False, True):
        options = dist.AllreduceOptions()
        options.asyncOp = asynchronous
        work = dist.group.WORLD.allreduce([x], options)
        assert work.get_future().wait()[0] is x
        work.synchronize()
        work.block_current_stream()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
    assert backend.find()._get_sequence_number_for_group() == 2


@on_ranks(2)
def test_failed_work_says_how(rank, size):
    x = torch.ones(3 + rank)
    work = dist.all_reduce(x, async_op=True)
    for wait in (work.wait, work.wait, work.get_future().wait):
        with pytest.raises(pycomm.WireMismatch) as caught:
            wait()
        calls = [f"rank {n} calls all_reduce #1 (sum of {3 + n} float32)" for n in (0, 1)]
        assert all(call in str(caught.value) for call in calls)  # in any order
    assert not work.is_success()
    with pytest.raises(pycomm.Error):  # the group has failed, and the error says why
        dist.all_reduce(torch.ones(1))
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
def test_shrink_group(rank, size):
    """Without an error before, and without SHRINK_ABORT; elastic/test_members.py has both."""
    if rank == 1:
        time.sleep(0.5)
        return
    group = dist.shrink_group([1])
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


# --------------------------------------------------------------------------------------- far stores
# Groups with a remote store: a round trip to it takes longer than the steps of a wait.


class FarStore(Proxy):
    """A store behind a proxy.

    Args:
        round_trip: seconds between a request and its answer.
    """

    def __init__(self, round_trip: float) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        super().__init__(("127.0.0.1", self.server.port))
        self.port = self.address[1]
        self.tap = partial(self._late, round_trip / 2)

    def _late(self, delay: float, data: bytes) -> bytes:
        time.sleep(delay)
        return data


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=40))


@pytest.fixture(params=[0.06, 0.2], ids=["60ms", "200ms"])
def port(request) -> Iterator[int]:
    """Return the port of a store that is so many seconds away."""
    store = FarStore(request.param)
    yield store.port
    store.close()


LATE = """
import sys, time, torch.distributed as dist
rank, size, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port)
if rank == 1: time.sleep(1.5)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
dist.barrier()
print("met")
dist.destroy_process_group()
"""


def test_who_waits_for_a_late_rank_prints_nothing(tmp_path):
    far = FarStore(0.0)
    script = tmp_path / "late.py"
    script.write_text(LATE)
    ranks = run_ranks(str(script), words=["2", str(far.port)], merged=True, autoload=True)
    said = [rank.stdout for rank in ranks]
    far.close()
    # Rank 0 tells of its group, and nothing else.
    assert [re.sub("pycomm: version .*\n", "", text) for text in said] == ["met\n"] * 2


@on_ranks(3, backend=None, dies=[1])
def test_a_death_is_told_while_others_are_awaited(rank, size, own, port):
    store = client(port)
    if rank == 1:
        # By then ranks 0 and 1 are in the rendezvous, which rank 2 keeps from beginning.
        threading.Timer(4.0, os._exit, (1,)).start()
    if rank == 2:
        store.get("told")
        return
    with pytest.raises(pycomm.PeerLost, match="rank 1 died while group") as caught:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
    assert caught.value.rank == 1
    store.set("told", "")


@on_ranks(4, backend=None)
def test_monitored_barrier_names_the_missing_alone(rank, size, own, port):
    """The time that is left is then shorter than a round trip."""
    options = {"store": client(port), "timeout": timedelta(seconds=30)}
    dist.init_process_group("pycomm", rank=rank, world_size=size, **options)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("over")
    elif rank == 0:
        for other in (2, 3):
            store.get(f"comes {other}")
        time.sleep(0.5)
        with pytest.raises(pycomm.Timeout, match="Ranks 1 failed to pass monitoredBarrier"):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.3), True)
        store.set("over", "")
    else:
        store.set(f"comes {rank}", "")
        with pytest.raises(RuntimeError, match="Ranks 1 failed"):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=5), True)
    dist.barrier()


@on_ranks(1, backend=None)
def test_a_store_that_is_gone_is_told_in_one_sentence(rank, size, store):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = client(server.port)
    servers = [server]
    del server
    threading.Timer(0.5, servers.clear).start()
    with pytest.raises(pycomm.Error, match="the store failed at the key") as caught:
        dist.init_process_group("pycomm", store=store, rank=0, world_size=2)
    assert "\n" not in str(caught.value)  # torch's stack says nothing to a user


# -------------------------------------------------------------------------------- few descriptors
# A rank that has hardly a descriptor left: its group is made, or all learn at once why not.


RANKS = """
import contextlib, json, os, resource, signal, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
import pycomm._build, pycomm.backend, pycomm.straggler
pycomm._build.load_c10d()
options = {"timeout": timedelta(seconds=100)}

def keep(free):
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, highest + 20))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for fd in taken[len(taken) - free:]:
        os.close(fd)

def outcome(rank, port, free):
    signal.alarm(90)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, **options)
    store.set(f"here {rank}", "")
    store.get(f"here {1 - rank}")
    if free is not None:
        keep(free)
    start = time.monotonic()
    try:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=2, **options)
        x = torch.ones(4)
        dist.all_reduce(x)
        said = f"sum {x[0].item()}"
    except pycomm.Error as error:
        said = str(error).splitlines()[0]
    return time.monotonic() - start, said

for poor in range(2):
    for free in range(1, 5):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [os.pipe(), os.pipe()]
        for rank in range(2):
            if os.fork() == 0:
                said = outcome(rank, server.port, free if rank == poor else None)
                os.write(pipes[rank][1], json.dumps(said).encode())
                os._exit(0)
        said = []
        for reader, writer in pipes:
            os.close(writer)
            said.append(json.loads(os.read(reader, 1 << 16) or "null"))
        print(json.dumps([poor, free, said]), flush=True)
"""
SOON = 20.0
"""Seconds; the group's own deadline is 100."""


def test_a_group_is_made_or_all_learn_why_not():
    """With 3 left, rank 0 could make shared memory, but not accept who fetches it."""
    ended = run("-c", RANKS, timeout=200)
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(cases) == 8, ended.stderr
    for poor, free, said in cases:
        assert all(one and one[0] < SOON for one in said), (poor, free, said)
        texts = [text for _, text in said]
        fine = texts == ["sum 2.0"] * 2
        # Who has said why leaves at once, and may be seen to be gone before its words are read.
        assert fine or "Too many open files" in texts[poor], (poor, free, said)
        gone = f"rank {poor} died" in texts[1 - poor]
        assert fine or gone or "Too many open files" in texts[1 - poor], (poor, free, said)
