"""abort() ends everything in bounded time, and no error leaves a thread or a file behind."""

from __future__ import annotations

import gc
import math
import resource
import signal
import tempfile
import threading
import time

import numpy as np
import pytest

from pycomm import _C, _test, log
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, Timeout
from tests.collectives.device import jobs as device
from tests.collectives.ways import WAYS, calls
from tests.extent import each_value
from tests.faults.injection.rank import held, leaks
from tests.ranks import (
    attempt,
    in_child,
    on_processes,
    on_threads,
    run,
    run_processes,
    without_threads,
)

WAITS = {
    "all_reduce": lambda c: c.all_reduce(np.ones(10)),
    "coded": lambda c: c.all_reduce_coded(np.ones(10_000, np.float32), "quant"),
    "barrier": lambda c: c.barrier(),
    "broadcast": lambda c: c.broadcast(np.ones(10), 1),
    "recv": lambda c: c.recv(np.ones(10), 1).wait(),
    "any recv": lambda c: c.recv(np.ones(10)).wait(),
    "send": lambda c: c.send(np.ones(4_000_000), 1).wait(),
}


def two_barriers(c):
    """The other rank may reach the first barrier before it is stopped, but not both."""
    c.barrier()
    c.barrier()


everywhere = pytest.mark.parametrize("way", ["window", "direct", "tcp"])


@each_value
@everywhere
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("by", ["same rank", "other rank"])
def test_abort_unblocks_everybody(way, wait, by):
    over = threading.Event()

    def job(c):
        if c.rank == 1:
            if by == "other rank":
                time.sleep(0.05)
                c.abort("the user pressed stop")
            over.wait(10)
            with pytest.raises(Error, match="the user pressed stop"):
                two_barriers(c)
            return None
        if by == "same rank":
            threading.Timer(0.05, c.abort, ("the user pressed stop",)).start()
        with pytest.raises(Error, match="the user pressed stop"):
            WAITS[wait](c)
        over.set()
        with pytest.raises(Error, match="the user pressed stop"):
            c.barrier()

    run(2, job, limit=20.0, timeout=60.0, **WAYS[way])  # nobody waits for the deadline


@everywhere
def test_a_request_is_done_when_its_group_has_failed(way):
    """Its wait raises, and who only asks for the end would ask for ever."""
    posted = threading.Barrier(2)

    def job(c):
        request = c.recv(np.ones(10), 1 - c.rank)
        posted.wait(10)
        if c.rank == 0:
            c.abort("the user pressed stop")
        end = time.monotonic() + 10
        while not request.done():
            assert time.monotonic() < end
            time.sleep(0.001)
        with pytest.raises(Error, match="the user pressed stop"):
            request.wait()

    run(2, job, **WAYS[way])


def test_abort_unblocks_a_rank_that_is_alone_and_may_be_repeated():
    with Communicator(Store.local(), 0, 1) as c:
        threading.Timer(0.05, c.abort, ("first",)).start()
        with pytest.raises(Error, match="first"):
            c.recv(np.ones(10), 0).wait(10)
        c.abort("second")
        for _ in range(2):
            with pytest.raises(Error, match="first"):
                c.barrier()
            c.abort("third")


@pytest.mark.parametrize("run_on", [run, run_processes])
def test_of_two_reasons_for_an_abort_the_first_counts(run_on):
    def job(c):
        if c.rank < 2:
            time.sleep(0.05 + 0.1 * c.rank)
            c.abort(f"reason {c.rank}")
            time.sleep(0.3)
            return ""
        time.sleep(0.3)
        with pytest.raises(Error) as caught:
            c.barrier()
        return str(caught.value)

    *_, text = run_on(3, job, transport="shm")
    assert "reason 0" in text
    assert "reason 1" not in text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_errors_leave_no_thread_no_file_and_no_memory_behind(transport):
    def fail(c):
        c.recv(np.ones(10), 1 - c.rank)
        c.all_reduce(np.ones(10))
        time.sleep(0.01)
        c.all_reduce(np.ones(10 + c.rank))

    attempt(2, fail, transport=transport)
    before = held()
    for _ in range(5):
        assert all(isinstance(e, Error) for e in attempt(2, fail, transport=transport))
    assert leaks(before, 5.0) == {}


# --------------------------------------------------------------------------------------------- disk
# Full disks and exhausted shared memory: no data are lost.


def without_room(rank: int = 0, room: int = 4096) -> None:
    """Limit the files that this process writes to `room` bytes, shared memory included."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def test_without_room_for_shared_memory_ranks_talk_by_tcp_and_say_why():
    said: list[str] = []

    def prepare(rank):
        without_room()
        log.logger.addFilter(lambda record: said.append(record.getMessage()) is None)

    def job(c):
        x = np.full(1000, c.rank + 1.0)
        c.all_reduce(x)
        return c.describe(), float(x[0]), " ".join(said)

    outcomes = run_processes(2, job, prepare=prepare, transport="auto")
    for how, total, text in outcomes:
        assert "tcp to" in how
        assert total == 3
        assert "shares no memory with the other ranks of its host" in text
    assert "ulimit -f" in outcomes[0][2]


def test_without_room_for_shared_memory_alone():
    with pytest.raises(AssertionError, match=r'does not reach rank .; use transport "auto"'):
        run_processes(2, lambda c: c.barrier(), prepare=without_room, transport="shm")


def test_a_store_on_a_full_disk_says_so_and_leaves_nothing(tmp_path):
    store = Store.file(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.getsignal(signal.SIGXFSZ)
    try:
        without_room(room=2)
        with pytest.raises(Error, match=r"cannot write .*File too large"):
            store.set("key", "a long value")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.rglob("*.*")) == []
    store.set("key", "a long value")
    assert store.get("key", timeout=1) == b"a long value"


# ------------------------------------------------------------------------------------------ threads
# A process that is allowed no more threads.


STARTS = {
    "rank 0 cannot": lambda c: c.recv(np.empty(1), 0),
    "tcp: rank . cannot": lambda c: run(2, lambda c: None, transport="tcp"),
    "endpoint: this process cannot": lambda c: _C.StoreEndpoint("", _C.CommunicatorOptions()),
    "queue: cannot": lambda c: _test.Queue().submit(int),
}


@pytest.mark.parametrize("says", STARTS)
def test_without_threads_a_call_says_so_and_leaves_nothing_posted(says):
    with Communicator(Store.local(), 0, 1, timeout=10) as c:
        said = pytest.raises(Error, match=f"{says} start a thread: .*; raise the limit")
        with without_threads(), said:
            STARTS[says](c)
        c.send(np.ones(1), 0).wait()
        out = np.empty(1)
        c.recv(out, 0).wait()
        assert out[0] == 1


# ------------------------------------------------------------------------------------------- forked
# A forked child (a data loader's worker) holds a copy of its parent's group.
#
# Every call must raise in the child, and must not be visible to the parent's peers.


def more_calls(c, x):
    return {
        "a tiny all_reduce": lambda: c.all_reduce(x[:4]),
        "all_reduce_coded": lambda: c.all_reduce_coded(x, "quant:bits=8"),
        "send": lambda: c.send(x, 1 - c.rank),
        "recv": lambda: c.recv(x, 1 - c.rank),
        "allocate": lambda: c.allocate(10),
    }


def every_call(c):
    x = np.ones(1000, np.float32)
    c.all_reduce(x)
    late = c.recv(np.empty(10, np.float32), 1 - c.rank)
    every = calls(c, 1000) | more_calls(c, x)
    outcomes = {name: in_child(call) for name, call in every.items()}
    outcomes |= {"wait": in_child(late.wait), "done": in_child(late.done)}
    assert set(outcomes.values()) == {"refused"}, outcomes

    def end_everything():
        nonlocal late, c
        c.abort("the child has had enough")
        c.close()
        late = c = None
        gc.collect()

    assert in_child(end_everything) == "returned"
    x[:] = c.rank + 1
    c.all_reduce(x)  # unaffected by the child
    c.send(np.ones(10, np.float32), 1 - c.rank).wait()
    late.wait()
    assert set(x.tolist()) == {3.0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nothing_that_a_child_calls_reaches_the_group(transport):
    run_processes(2, every_call, transport=transport)


def test_children_of_a_process_whose_ranks_are_threads():
    def job(c):
        outcome = in_child(lambda: c.all_reduce(np.ones(1000, np.float32)))
        c.barrier()
        return outcome

    assert run(2, job) == ["refused"] * 2


def test_a_device_group_in_a_child():
    group = _test.DeviceGroup(_C.Store.local(), 0, 1)
    x = np.ones(10, np.float32)
    args = ("all_reduce", x.ctypes.data, x.ctypes.data, 10, _C.DType.float32)
    assert in_child(lambda: group.run(*args)) == "refused"
    assert in_child(group.check) == "refused"
    assert in_child(lambda: group.abort("from the child")) == "returned"
    group.run(*args)
    group.check()
    group.close()


@on_processes(2)
def test_a_child_may_have_a_group_of_its_own(c):
    def job():
        with tempfile.TemporaryDirectory() as folder:
            with Communicator(Store.file(folder), 0, 1) as own:
                own.all_reduce(np.ones(10, np.float32))
            assert in_child(c.barrier) == "refused"  # in a grandchild
            c.barrier()

    assert in_child(job) == "refused"
    c.barrier()


def test_the_end_of_a_queue_finishes_what_is_queued():
    queue, seen = _test.Queue(), []
    for i in range(10):
        queue.submit(lambda i=i: (time.sleep(0.002), seen.append(i)))
    del queue
    assert seen == list(range(10))


def test_a_child_drops_its_copy_of_a_queue():
    queue, done = _test.Queue(), threading.Event()
    queue.submit(done.set)
    assert done.wait(10)
    held = [queue]
    del queue

    def drop():
        held.clear()
        gc.collect()

    assert in_child(drop) == "returned"
    held[0].submit(done.set)


# ---------------------------------------------------------------------------------- who never comes
# A rank that never joins is named by every rank that waited for it.


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
def test_at_the_rendezvous(transport):
    store = Store.local()

    def meet(rank):
        Communicator(store, rank, 4, transport=transport, timeout=0.3)

    for error in on_threads((0, 2), meet, 10):
        assert isinstance(error, Timeout)
        assert "rank(s) that did not come" in str(error)
        assert str(error).rstrip().endswith("1, 3")


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
@pytest.mark.parametrize("absent", [0, 2])
def test_who_hears_of_another_s_limit_says_whose_it_is(transport, absent):
    """Rank 1 waits up to a minute, another rank a fraction of a second; a third never joins."""
    store, impatient = Store.local(), 2 - absent

    def meet(rank):
        timeout = 0.3 if rank == impatient else 60.0
        Communicator(store, rank, 3, transport=transport, timeout=timeout)

    errors = on_threads((1, impatient), meet, 30)  # half of rank 1's own limit
    for error in errors:
        assert isinstance(error, Timeout)
        assert "is not complete after 300 ms" in str(error)
        assert str(error).rstrip().endswith(f": {absent}") or f", {absent}" in str(error)
        assert "60000" not in str(error)
    assert f"rank {impatient}" in str(errors[0])


# ------------------------------------------------------------------------------------------ endless
# Timeouts: those that mean "never" wait, and meaningless ones are refused.


LONG = [3e7, 1e10, 1e300, math.inf]
NONSENSE = [-1.0, -1e-9, -1e300, -math.inf, math.nan]


@each_value
@everywhere
@pytest.mark.parametrize("seconds", LONG)
def test_a_rank_that_is_late_is_waited_for(way, seconds):
    def job(c):
        x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
        for timeout in (0.0, seconds):  # the group's timeout, and one per call
            if c.rank == 1:
                time.sleep(0.1)
            c.all_reduce(x, timeout=timeout)
        c.timeout = seconds
        c.barrier()
        if c.rank == 1:
            time.sleep(0.1)
            c.send(x, 0).wait(seconds)
        else:
            c.recv(y, 1).wait(seconds)
        c.barrier()
        return x, y

    (x, y), _ = run(2, job, timeout=seconds, **WAYS[way])
    assert np.array_equal(x, np.full(3, 4, np.float32))
    assert np.array_equal(y, x)


@pytest.mark.parametrize("seconds", LONG)
def test_kernels_wait_for_a_rank_that_is_late(seconds):
    def job(c):
        c.group.set_timeout(seconds)
        x = c.put(np.ones(9, np.float32))
        if c.rank == 1:
            time.sleep(0.1)
        c.all_reduce(x)
        return x.get()

    for result in device.run(2, job, timeout=seconds):
        assert np.array_equal(result, np.full(9, 2, np.float32))


@pytest.mark.parametrize("seconds", NONSENSE)
def test_what_is_no_time_is_refused(seconds):
    def job(c):
        x = np.ones(3, np.float32)
        for call in (
            lambda: c.all_reduce(x, timeout=seconds),
            lambda: c.barrier(timeout=seconds),
            lambda: setattr(c, "timeout", seconds),
            lambda: c.recv(x, 1 - c.rank).wait(seconds),
        ):
            with pytest.raises(Error, match=r"the timeout is .* seconds; give a number"):
                call()
        with pytest.raises(Error, match="the timeout of the group is 0 ms; give one that is more"):
            c.timeout = 0.0

    run(2, job)
    with pytest.raises(Error, match=r"the timeout is .* seconds; give a number"):
        Communicator(Store.local(), 0, 1, timeout=seconds)
    with pytest.raises(Error, match=r"the timeout is .* seconds; give a number"):
        _C.Store.local().get("key", seconds)
