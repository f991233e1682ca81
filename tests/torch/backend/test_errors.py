"""Invalid input and failures: each error names the rank and the cause, and nothing hangs."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from tests.torch.pool import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["size", "dtype", "op"])
def test_different_calls_are_named_on_both_ranks(rank, size, kind, asynchronous):
    def call() -> Any:
        if kind == "size":
            return dist.all_reduce(torch.ones(10 + rank), async_op=asynchronous)
        if kind == "dtype":
            dtype = [torch.float32, torch.int32][rank]
            return dist.all_reduce(torch.ones(10, dtype=dtype), async_op=asynchronous)
        if kind == "op" and rank == 1:
            return dist.broadcast(torch.ones(10), 0, async_op=asynchronous)
        return dist.all_reduce(torch.ones(10), async_op=asynchronous)

    if asynchronous:
        work = call()
        waits = [work.wait, work.wait, work.get_future().wait]
    else:
        waits = [call]
    for wait in waits:
        with pytest.raises(pycomm.WireMismatch) as caught:
            wait()
        text = str(caught.value)
        assert "rank 0" in text
        assert "rank 1" in text
        assert {"size": "11", "dtype": "int32", "op": "broadcast"}[kind] in text
    with pytest.raises(pycomm.Error):  # the group has failed, and the error says why
        dist.all_reduce(torch.ones(1))


@on_ranks(2)
def test_different_codecs_are_an_error_on_the_wire_too(rank, size):
    model = DistributedDataParallel(nn.Linear(64, 64))
    with patch("pycomm.policy.plan.agree_on_options"):  # skips the comparison
        state = pycomm.HookState(["int8", "int4"][rank], model)
    state.reducer.agree = lambda: None
    model.register_comm_hook(state, pycomm.compress_hook)
    with pytest.raises(pycomm.WireMismatch, match="bits=4"):
        model(torch.ones(1, 64)).sum().backward()


@on_ranks(2, timeout=1)
def test_rank_that_does_not_call_is_named(rank, size):
    start = time.monotonic()
    if rank == 1:
        time.sleep(3)
        return
    with pytest.raises(pycomm.Timeout, match=r"rank.* 1"):
        dist.all_reduce(torch.ones(10))
    native = backend.find()
    assert native is not None
    assert native.get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT
    assert 0.9 < time.monotonic() - start < 2.5


@on_ranks(2)
def test_abort_ends_waits_on_all_ranks(rank, size):
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        time.sleep(0.3)
        assert not work.is_completed()
        dist.group.WORLD.abort()
        with pytest.raises(pycomm.Error, match="abort"):
            work.wait()
        assert not work.is_success()
        return
    time.sleep(0.6)

    def call() -> None:
        dist.all_reduce(torch.ones(10))  # rank 0 had taken part in this one
        dist.all_reduce(torch.ones(10))

    with pytest.raises(pycomm.Error, match=r"rank 0.*abort"):
        call()


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


@on_ranks(2, dies={1})
def test_rank_that_dies_while_a_group_is_made_is_named(rank, size):
    dist.barrier()
    if rank == 1:
        os._exit(7)
    start = time.monotonic()
    with pytest.raises(pycomm.PeerLost, match=r"rank 1 died while group .* was made") as caught:
        dist.new_group(timeout=timedelta(seconds=20))
    assert caught.value.rank == 1
    assert time.monotonic() - start < 3


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
    assert native is not None
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
    assert native is not None
    assert "tcp" in native.describe()
    x = torch.ones(100000)
    dist.all_reduce(x)
    assert float(x[0]) == size
    assert native.wire_bytes >= 400000
    dist.destroy_process_group()


class Held:
    """Something in the frame of a call that fails."""


def fail_and_hold(rank: int, how: str, held: list[Any]) -> None:
    thing = Held()
    held.append(weakref.ref(thing))
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    if how == "work":
        work.wait()
    else:
        work.get_future().wait()


@on_ranks(2)
@pytest.mark.parametrize("how", ["work", "future"])
def test_an_error_keeps_no_frame_that_it_has_passed_through(rank, size, how):
    held: list[Any] = []
    with pytest.raises(pycomm.WireMismatch):
        fail_and_hold(rank, how, held)
    gc.collect()
    assert held[0]() is None


def test_errors_are_copied_with_what_they_name():
    error = pickle.loads(pickle.dumps(pycomm.PeerLost("ranks 1 and 2 died", 1, [1, 2])))
    assert (str(error), error.rank, error.ranks) == ("ranks 1 and 2 died", 1, [1, 2])
