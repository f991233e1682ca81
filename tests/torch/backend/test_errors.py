"""Invalid input, failures, groups that end while in use: each error names the rank and the cause,
nothing hangs, no memory is touched afterwards, and finished work is not kept alive.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from tests.extent import each_value
from tests.ranks import good, in_child, on_threads
from tests.torch.interpreter import run_ranks
from tests.torch.pool import on_ranks


@on_ranks(2)
def test_an_error_that_passes_a_callback_keeps_its_class(rank, size):
    # Gradients of float64 are averaged by the group's all_reduce, and checked in a callback.
    model = DistributedDataParallel(nn.Linear(4, 4, dtype=torch.float64))
    state = pycomm.compress(model)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    state.settle()
    assert state.overflows == 0  # the callback has run
    if rank == 1:
        dist.group.WORLD.abort()
        return
    with pytest.raises(pycomm.Error, match="rank 1 aborted"):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()


@on_ranks(2, dies={1}, timeout=60)
def test_dead_rank_is_named_by_backward(rank, size):
    model = DistributedDataParallel(nn.Linear(8, 8))
    if rank == 1:
        os._exit(7)
    start = time.monotonic()
    with pytest.raises(pycomm.PeerLost, match="rank 1") as caught:
        model(torch.ones(1, 8)).sum().backward()
    assert caught.value.rank == 1
    assert time.monotonic() - start < 20


@on_ranks(2, timeout=20)
def test_a_raise_in_a_hook_reaches_the_others(rank, size):
    model = DistributedDataParallel(nn.Linear(8, 8))

    def hook(group, bucket):  # torch would check annotations
        if rank == 1:
            raise ValueError("the user's hook has failed")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    if rank == 1:
        with pytest.raises((ValueError, RuntimeError), match="the user's hook has failed"):
            model(torch.ones(1, 8)).sum().backward()
        return  # this rank leaves the group
    # Torch turns an error that passes through then() of a user's hook into a RuntimeError.
    with pytest.raises(RuntimeError, match=r"rank 1 .*left the group"):
        model(torch.ones(1, 8)).sum().backward()


@on_ranks(2, timeout=20)
def test_abort_ends_a_shutdown_that_waits(rank, size):
    native = backend.find()
    if rank == 1:
        time.sleep(1.5)
        return
    work = dist.all_reduce(torch.ones(10), async_op=True)
    timer = threading.Timer(0.2, native.abort)
    timer.start()
    start = time.monotonic()
    native.shutdown()  # finishes all issued operations
    assert time.monotonic() - start < 1.2
    timer.join()
    with pytest.raises(pycomm.Error, match="abort"):
        work.wait()
    native.abort()  # a second abort does nothing


@on_ranks(2, backend=None)
def test_options_reach_the_communicator(rank, size, store):
    with pytest.raises(TypeError, match=r"pg_options .* must be pycomm\.Options"):
        dist.init_process_group(
            "pycomm", store=store, rank=rank, world_size=size, pg_options=timedelta(1)
        )
    with pytest.raises(TypeError, match="no option 'codec'"):
        pycomm.Options(codec="int8")
    options = pycomm.Options(transport="tcp", sockets=1, interface="lo")
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, pg_options=options)
    native = backend.find()
    assert "tcp" in native.describe()
    x = torch.ones(100000)
    dist.all_reduce(x)
    assert float(x[0]) == size
    assert native.wire_bytes >= 400000


class Held:
    """Something in the frame of a call that fails."""


@on_ranks(2)
@pytest.mark.parametrize("how", ["work", "future"])
def test_an_error_keeps_no_frame_that_it_has_passed_through(rank, size, how):
    held: list[Any] = []

    def fail() -> None:
        thing = Held()
        held.append(weakref.ref(thing))
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        (work if how == "work" else work.get_future()).wait()

    with pytest.raises(pycomm.WireMismatch):
        fail()
    gc.collect()
    assert held[0]() is None


def test_errors_are_copied_with_what_they_name():
    error = pickle.loads(pickle.dumps(pycomm.PeerLost("ranks 1 and 2 died", 1, [1, 2])))
    assert (str(error), error.rank, error.ranks) == ("ranks 1 and 2 died", 1, [1, 2])


# ------------------------------------------------------------------ threads that wait


WAITS: dict[str, Callable[[Any, torch.Tensor, int], Any]] = {
    "recv": lambda group, x, peer: group.recv([x], peer, 0).wait(),
    "any": lambda group, x, peer: group.recv_anysource([x], 0).wait(),
    "send": lambda group, x, peer: group.send([x], peer, 0).wait(),
    "future": lambda group, x, peer: group.recv([x], peer, 0).get_future().wait(),
}


@on_ranks(2)
@each_value
@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_waiting_threads_hear_of_a_destroyed_group(rank, size, transport, kind):
    for i in range(6):
        options = pycomm.Options(transport=transport)
        group = dist.new_group(backend="pycomm", pg_options=options)
        dist.barrier(group=group)
        x = torch.zeros(400_000)  # too long to be sent before the receive is posted
        timer = threading.Timer(0.01 + 0.003 * i, dist.destroy_process_group, [group])
        timer.start()
        said = on_threads(range(3), lambda _, g=group, x=x: WAITS[kind](g, x, 1 - rank), 20)
        timer.join()
        assert all(isinstance(error, RuntimeError) for error in said), said
    dist.barrier()


AT_EXIT = """
import sys, threading, time, torch, torch.distributed as dist
rank, kind, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if kind == "without torch":
    from array import array
    from pycomm.communicator import Communicator, Store
    group = Communicator(Store.file(store), rank, 2, transport=sys.argv[4])
    group.barrier()
    def wait():
        request = group.recv(array("f", [0] * 9), 1 - rank)
        entered.release()
        request.wait(60)
else:
    dist.init_process_group("pycomm", init_method="file://" + store, rank=rank, world_size=2)
    dist.barrier()
    # Made here: torch.ones() in a daemon ends the process when the interpreter ends.
    tensors = [torch.ones(9 if kind in ("recv", "callbacks") else 1 << 22) for _ in range(8)]
    def wait():
        if kind in ("recv", "callbacks"):
            work = dist.irecv(tensors.pop(), 1 - rank)
        elif kind == "all_reduce":
            work = dist.all_reduce(tensors.pop(), async_op=True)
        if kind == "callbacks":
            for each in (work, dist.all_reduce(tensors.pop(), async_op=True)):
                each.get_future().then(lambda done: done.value()[0].sum().item())
        entered.release()
        if kind == "unanswered": dist.all_reduce(tensors.pop())
        else: work.wait()
entered = threading.Semaphore(0)
if (rank, kind) == (1, "unanswered"):
    time.sleep(4)
    raise SystemExit
for _ in range(8 if kind == "unanswered" else 3): threading.Thread(target=wait, daemon=True).start()
# All of the receives wait then; of all-reduces one does, and others are being issued.
for _ in range(1 if kind in ("all_reduce", "unanswered") else 3): entered.acquire(timeout=20)
if len(sys.argv) > 5: raise SystemExit(int(sys.argv[5]))
"""


def run_to_the_end(tmp_path: Path, kind: str, transport: str, *more: str) -> list[int]:
    store = str(tmp_path / "store")
    if kind == "without torch":
        (tmp_path / "store").mkdir()
    words = [kind, store, transport, *more]
    ranks = run_ranks("-c", AT_EXIT, words=words, autoload=True, finalized=True)
    texts = [rank.stderr for rank in ranks]
    assert not any("terminate" in text or "Fatal" in text for text in texts), texts
    return [rank.returncode for rank in ranks]


@each_value
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("kind", ["recv", "all_reduce", "callbacks", "without torch"])
def test_an_interpreter_that_ends_while_daemons_wait(tmp_path, monkeypatch, kind, transport):
    monkeypatch.setenv("PYCOMM_TRANSPORT", transport)
    assert run_to_the_end(tmp_path, kind, transport) == [0, 0]


def test_an_interpreter_that_ends_while_daemons_get_an_error(tmp_path, monkeypatch):
    """Rank 1 does not answer, so the all_reduces of rank 0 fail while its interpreter ends."""
    monkeypatch.setenv("PYCOMM_TIMEOUT", "2")
    assert run_to_the_end(tmp_path, "unanswered", "auto") == [0, 0]


def test_an_interpreter_that_is_left_in_the_middle(tmp_path):
    assert run_to_the_end(tmp_path, "recv", "auto", "7") == [7, 7]


UNCAUGHT = """
import multiprocessing, sys, torch, torch.distributed as dist
import pycomm.backend
from torch.multiprocessing.spawn import _wrap
def run(rank, store):
    dist.init_process_group("pycomm", init_method="file://" + store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        raise ValueError("boom")
    dist.recv(torch.ones(5), 1)
if __name__ == "__main__":
    rank, store, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if way == "plain":
        run(rank, store)
    by_torch = _wrap, (run, rank, (store,), store + " error")
    target, args = by_torch if rank == 1 else (run, (rank, store))
    child = multiprocessing.get_context("spawn").Process(target=target, args=args)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("way", ["plain", "spawned"])
def test_a_rank_that_an_error_ends_waits_for_nobody(tmp_path, way):
    """Rank 0 never comes to the all_reduce, and both would wait until the timeout.

    multiprocessing catches the error, and torch's `spawn` makes it an exit status.
    """
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT)
    words = [str(tmp_path / "store"), way]
    ranks = run_ranks(str(script), words=words, autoload=True, finalized=True)
    assert all(rank.returncode == 1 for rank in ranks)
    assert way == "spawned" or "ValueError: boom" in ranks[1].stderr
    assert "rank 1 ended by an uncaught ValueError" in ranks[0].stderr


# ------------------------------------------------------------------ lifetimes


def gone(reference: weakref.ref[Any]) -> bool:
    """Return whether an object is freed in time: threads may still have to release it."""
    for _ in range(2000):
        gc.collect(0)
        if reference() is None:
            return True
        time.sleep(0.01)
    return False


@on_ranks(2)
@pytest.mark.parametrize("numel", [5, 300_000])
def test_messages_are_not_kept(rank, size, numel):
    peer = 1 - rank
    for form in ("waited", "dropped", "with gaps", "asked", "future"):
        whole = torch.ones(2 * numel)
        x = whole[::2] if form == "with gaps" else whole[:numel]
        work = dist.isend(x, peer) if rank == 0 else dist.irecv(x, peer)
        if form == "asked":
            while not work.is_completed():
                time.sleep(0.001)
        elif form == "future":
            work.get_future().wait()
        elif form != "dropped":
            work.wait()
        reference = weakref.ref(whole)
        del work, x, whole
        assert gone(reference), form
    dist.barrier()


@on_ranks(2)
def test_tensors_of_collectives_are_not_kept(rank, size):
    n = 5000
    calls = {
        "all_reduce": lambda x, y: dist.all_reduce(x, async_op=True),
        "broadcast": lambda x, y: dist.broadcast(x, 0, async_op=True),
        "reduce": lambda x, y: dist.reduce(x, 0, async_op=True),
        "all_gather": lambda x, y: dist.all_gather([y, y.clone()], x, async_op=True),
        "all_gather_single": lambda x, y: dist.all_gather_into_tensor(
            torch.empty(2 * n), x, async_op=True
        ),
        "reduce_scatter": lambda x, y: dist.reduce_scatter_tensor(
            x[: n // 2], y, async_op=True
        ),
        "all_to_all": lambda x, y: dist.all_to_all_single(x, y, async_op=True),
        "gather": lambda x, y: dist.gather(
            x, [y, y.clone()] if rank == 0 else None, 0, async_op=True
        ),
        "scatter": lambda x, y: dist.scatter(
            x, [y, y.clone()] if rank == 0 else None, 0, async_op=True
        ),
        "failed": lambda x, y: dist.all_reduce(x.expand(2, n), async_op=True),
    }  # fmt: skip
    for name, call in calls.items():
        x, y = torch.ones(n), torch.ones(n)
        references = [weakref.ref(x), weakref.ref(y)]
        try:
            work = call(x, y)
            future = work.get_future().then(lambda done: None)
            work.wait()
            del work, future
        except pycomm.Error:
            assert name == "failed"
        del x, y
        assert all(gone(reference) for reference in references), name
    dist.barrier()


@on_ranks(2)
def test_tensors_works_and_futures_outlive_their_group(rank, size):
    group = dist.new_group(backend="pycomm")
    native: Any = group._get_backend(torch.device("cpu"))
    x = native.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    x.fill_(rank + 1)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    future = work.get_future()
    dist.destroy_process_group(group)
    del native, group
    assert x.tolist() == [3.0] * 1000
    x += 1
    assert future.wait()[0][0].item() == 4.0
    assert work.is_success()
    work.wait()
    dist.all_reduce(x)
    assert x.tolist() == [8.0] * 1000


# -------------------------------------------------------------------------------- forked children
# A forked child of a rank (a data loader's worker) and its parent's process group.
#
# Every operation raises in the child, and reaches neither the group nor the store.


CALLS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "all_reduce": lambda x, rank: dist.all_reduce(x),
    "an asynchronous all_reduce": lambda x, rank: dist.all_reduce(x, async_op=True),
    "all_gather": lambda x, rank: dist.all_gather_into_tensor(torch.empty(2 * x.numel()), x),
    "reduce_scatter": lambda x, rank: dist.reduce_scatter_tensor(torch.empty(x.numel() // 2), x),
    "all_to_all": lambda x, rank: dist.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda x, rank: dist.broadcast(x, 0),
    "barrier": lambda x, rank: dist.barrier(),
    "send": lambda x, rank: dist.send(x, 1 - rank),
    "irecv": lambda x, rank: dist.irecv(x, 1 - rank),
}


@on_ranks(2, backend=None)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_cannot_use_the_group_of_its_parent(rank, size, store, transport):
    options = pycomm.Options(transport=transport)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, pg_options=options)
    x = torch.full((1000,), 1000.0)
    under_way = dist.irecv(torch.empty(10), 1 - rank, tag=3)
    done = dist.all_reduce(torch.ones(10), async_op=True)
    done.wait()
    outcomes = {what: in_child(lambda call=call: call(x, rank)) for what, call in CALLS.items()}
    outcomes["wait for a receive"] = in_child(under_way.wait)
    assert set(outcomes.values()) == {"refused"}, outcomes

    def end_everything() -> None:
        dist.destroy_process_group()
        gc.collect()

    assert in_child(end_everything) == "returned"
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    assert set(x.tolist()) == {3.0}
    dist.send(torch.ones(10), 1 - rank, tag=3)
    under_way.wait()


# ------------------------------------------------------------------------------------ group threads
# Several threads in one group at once, and ranks that die or leave during an operation.


def at_once(*jobs: Callable[[], None]) -> None:
    """Run jobs on threads of their own, and raise the first exception of any of them."""
    good(on_threads(range(len(jobs)), lambda number: jobs[number](), 90))


@on_ranks(2, timeout=60)
def test_threads_share_a_group_for_equal_collectives_and_messages(rank, size):
    # The values are equal, whichever threads of the ranks are matched.
    def synchronous():
        for i in range(60):
            x = torch.full((3000,), 1.0)
            dist.all_reduce(x)
            assert x.tolist() == [size] * 3000, i

    def asynchronous():
        for _ in range(6):
            tensors = [torch.full((3000,), 1.0) for _ in range(10)]
            works = [dist.all_reduce(x, async_op=True) for x in tensors]
            sums = [work.get_future().then(lambda done: done.value()[0].sum()) for work in works]
            for work, x, total in zip(works, tensors, sums, strict=True):
                work.wait()
                assert x.tolist() == [size] * 3000
                assert total.wait().item() == 3000.0 * size

    peer = 1 - rank

    def ping(tag, numel):
        def job():
            for i in range(25):
                x = torch.full((numel,), float(100 * tag + i))
                y = torch.empty(numel)
                work = dist.isend(x, peer, tag=tag)
                dist.recv(y, peer, tag=tag)
                work.wait()
                assert torch.equal(x, y)

        return job

    pings = (ping(tag, numel) for tag, numel in enumerate([3, 3000, 70_000, 400_000]))
    at_once(synchronous, asynchronous, synchronous, asynchronous, *pings)
    dist.barrier()


@on_ranks(2, timeout=60)
def test_threads_have_groups_of_their_own(rank, size):
    groups = [dist.new_group(backend="pycomm") for _ in range(4)]

    def user(number, group):
        def job():
            for i in range(30):
                x = torch.full((500 * number + 7,), float(i))
                dist.all_reduce(x, group=group)
                assert x[0].item() == size * i
            dist.destroy_process_group(group)

        return job

    at_once(*(user(number, group) for number, group in enumerate(groups)))
    dist.barrier()


# ------------------------------------------------------------------ during an operation


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("where", ["hook", "thread"])
def test_a_group_is_destroyed_during_backward(rank, size, where):
    group = dist.new_group(backend="pycomm")
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
        process_group=group,
        bucket_cap_mb=0.02,
    )
    model(torch.ones(2, 64)).sum().backward()
    killer = None
    if where == "hook" and rank == 0:
        model.module[2].weight.register_hook(lambda _: dist.destroy_process_group(group))
    elif where == "thread" and rank == 0:
        killer = threading.Thread(target=lambda: dist.destroy_process_group(group))

    def train():
        for step in range(2000):
            if killer and step == 3:
                killer.start()
            model(torch.ones(2, 64)).sum().backward()

    with pytest.raises((RuntimeError, ValueError)):
        train()
    if killer:
        killer.join(60)
        assert not killer.is_alive()
    elif rank > 0:
        dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(2)
def test_a_group_that_is_gone_says_so(rank, size):
    """Every thread that uses a destroyed group gets an error at once."""
    group = dist.new_group(backend="pycomm")
    native: Any = group._get_backend(torch.device("cpu"))
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    x = torch.ones(3)

    def use():
        for call in (
            lambda: native.allreduce([x], torch._C._distributed_c10d.AllreduceOptions()),
            lambda: native.send([x], 1 - rank, 0),
            lambda: native.recv([x], 1 - rank, 0),
            lambda: native.allocate_tensor(3, dtype=torch.float32, device=torch.device("cpu")),
            native.describe,
        ):
            with pytest.raises(pycomm.Error, match="the process group is shut down"):
                call()

    use()
    at_once(use, use)


@on_ranks(2)
def test_an_error_of_order_names_threads_as_its_cause(rank, size):
    """As when dcp.async_save runs on the group that trains, or a hook of another thread."""

    def in_thread(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    in_thread(lambda: dist.all_reduce(torch.ones(3), group=group))
    one = partial(dist.all_reduce, torch.ones(3), group=group)
    other = partial(dist.broadcast, torch.ones(5), 0, group=group)
    with pytest.raises(pycomm.WireMismatch, match=r"from several threads.* a group of its own"):
        one() if rank == 0 else other()
    dist.barrier()
    group = dist.new_group()  # calls of one thread alone have another cause
    one = partial(dist.all_reduce, torch.ones(3), group=group)
    other = partial(dist.broadcast, torch.ones(5), 0, group=group)
    with pytest.raises(pycomm.WireMismatch) as caught:
        one() if rank == 0 else other()
    assert "threads" not in str(caught.value)
