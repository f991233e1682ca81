"""Buckets over Gloo are reduced beside backward, by a thread with its own group; such groups."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from pycomm.policy.exchange import bytes_of
from pycomm.reduction import own_group
from pycomm.reduction.own_group import ExchangeThread
from tests.ranks import in_child
from tests.torch.interpreter import Interpreter
from tests.torch.pool import on_ranks

WIDTH = 256  # a weight has 65,536 values, and a bucket of its own
LAYERS = 4
FIXED = "int4 factors=off"
"""Of new factors residuals have other units, and are rounded in int8: these stay to the bit."""


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2, **options)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    x = torch.full((2, WIDTH), 1.0 + rank + step)
    model(x).square().mean().backward()


def results(model: nn.Module) -> list[bytes]:
    return [bytes_of(p.grad) for p in model.parameters() if p.grad is not None]


@on_ranks(2, backend="gloo")
@pytest.mark.parametrize("codec", ["int4", "topk:0.05", "lossless", "fp32"])
def test_a_bucket_travels_while_backward_goes_on(rank, ranks, codec):
    """The exchange of the first bucket begins when the last hook has been called."""
    model = wrapped()
    state = pycomm.compress(model, codec)
    backward(model, rank)
    last, waited = threading.Event(), []
    model.module[0].bias.register_hook(lambda grad: last.set())
    state.reducer.thread.run(torch.ones(1), lambda: waited.append(last.wait(60)))
    backward(model, rank, 1)
    assert waited == [True]


@on_ranks(3, backend="gloo")
def test_operations_of_the_user_are_not_mispaired(rank, ranks):
    """Between the hooks, on the model's own group, while buckets travel."""
    model = wrapped()
    pycomm.compress(model, "int8")
    sums: list[torch.Tensor] = []

    def add(grad: torch.Tensor) -> None:
        mine = torch.full((5,), float(rank + len(sums)))
        dist.all_reduce(mine)
        sums.append(mine)

    for layer in model.module:
        layer.weight.register_hook(add)
    for step in range(3):
        backward(model, rank, step)
    assert [float(s[0]) for s in sums] == [3.0 + 3 * i for i in range(3 * LAYERS)]


@on_ranks(2, backend="gloo")
def test_an_overflow_on_one_rank_is_one_of_all(rank, ranks):
    model = wrapped()
    state = pycomm.compress(model, FIXED)
    backward(model, rank)
    state.settle()
    norms = state.residual_norms()
    model(torch.full((2, WIDTH), torch.inf if rank else 1.0)).sum().backward()
    state.settle()
    assert state.overflows == 1
    assert state.residual_norms() == norms


@on_ranks(2, backend="gloo", dies=[1], timeout=5)
def test_a_rank_that_dies_is_an_error_of_backward(rank, ranks):
    model = wrapped()
    state = pycomm.compress(model, FIXED)
    for step in range(2):  # DDP makes its buckets anew between these
        backward(model, rank, step)
    state.settle()
    norms = state.residual_norms()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="reduce"):  # with the place that has failed
        backward(model, rank, 2)
    state.settle()  # ends, and takes the residuals back
    assert state.residual_norms() == norms
    with pytest.raises(RuntimeError):  # at once: its group is of no use
        state.reduce(torch.ones(WIDTH * WIDTH), ["0.weight"])


@on_ranks(2, backend="gloo")
def test_a_signal_ends_the_wait_for_a_step(rank, ranks):
    model = wrapped()
    state = pycomm.compress(model, "int4")
    release = threading.Event()
    state.reducer.thread.run(torch.ones(1), lambda: release.wait() and torch.ones(()))
    state.reduce(torch.ones(WIDTH * WIDTH), ["0.weight"])
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            state.settle()
    finally:
        signal.signal(signal.SIGALRM, old)
        release.set()
    state.settle()


@on_ranks(2, backend="gloo")
def test_the_thread_ends_with_the_state(rank, ranks):
    before = set(threading.enumerate())
    model = wrapped()
    state = pycomm.compress(model, "int4")
    backward(model, rank)
    made = set(threading.enumerate()) - before
    assert len(made) == 1
    del model, state
    gc.collect()
    end = time.monotonic() + 20
    while any(thread.is_alive() for thread in made) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in made)


@on_ranks(2, backend="gloo")
def test_who_gets_a_result_may_fork(rank, ranks):
    """A child has no thread that would end the wait for a step."""
    thread = ExchangeThread(dist.group.WORLD)
    begins, known = threading.Event(), []
    tensor = torch.ones(1)
    future, is_finite = thread.run(tensor, lambda: begins.wait(60) and torch.ones(()))

    def ask() -> None:
        signal.alarm(20)  # ends a child that waits
        assert is_finite()

    at_result = future.then(lambda _: known.append(in_child(ask)))
    begins.set()
    at_result.wait()
    assert known == ["returned"]


ENDS = """
import threading, torch, torch.distributed as dist
from pycomm.reduction.own_group import ExchangeThread
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
thread, runs = ExchangeThread(dist.group.WORLD), threading.Event()
def reduce():
    runs.set()
    x = torch.ones(600, 600)
    for _ in range(25):  # a tenth of what the end waits for, on an idle machine
        x = x @ x * 0
thread.run(torch.ones(1), reduce)
runs.wait()
"""


def test_an_interpreter_may_end_while_a_bucket_travels():
    """A thread that comes back from C++ later would abort the process."""
    process = Interpreter("-c", ENDS, merged=True, finalized=True)
    assert process.wait(60) == 0, process.output()


@on_ranks(2)
def test_the_group_of_the_thread_has_the_models_backend(rank, ranks):
    """The default group may be of one that moves no host tensors, such as NCCL."""
    model = wrapped(process_group=dist.new_group(backend="gloo"))
    state = pycomm.compress(model, "int4")
    backward(model, rank)
    assert dist.get_backend(state.reducer.thread.group) == dist.get_backend(model.process_group)
    assert backend.find(state.reducer.thread.group) is None


# ------------------------------------------------------------------------------------------- groups
# Groups of pycomm's objects are made and closed on several threads.


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_group_is_made_while_another_closes(rank, ranks, when):
    """torch names a group by a count of groups, which then differs between ranks."""
    former = own_group.make(dist.group.WORLD)
    destroy, gather = dist.destroy_process_group, own_group.gather
    destroyed, counted = threading.Event(), threading.Event()
    thread = threading.Thread(target=own_group.close, args=(former,))

    def slow(group: dist.ProcessGroup) -> None:
        destroy(group)
        destroyed.set()
        counted.wait(0.5)

    def gathered(*args: Any) -> Any:
        counts = gather(*args)
        if when == "while":
            thread.start()
        counted.set()
        thread.join()
        return counts

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(own_group, "gather", gathered)
            if when == "before":
                patch.setattr(dist, "destroy_process_group", slow)
                thread.start()
                assert destroyed.wait(10)
        made = own_group.make(dist.group.WORLD)
    if rank == 1:
        own_group.close(former)
    assert former not in dist.distributed_c10d._world.pg_map
    for group in (made, own_group.make(dist.group.WORLD)):
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [2.0, 2.0, 2.0]
        own_group.close(group)


def test_torch_asks_for_the_names_of_groups():
    """It would name them otherwise, by counts."""
    assert distributed_c10d._process_group_name.__module__ == distributed_c10d.__name__
    assert hasattr(distributed_c10d._process_group_name, "__wrapped__")


@on_ranks(4)
def test_parts_that_have_made_other_groups_make_one(rank, ranks):
    made = []
    for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        (ours,) = (part for part in parts if rank in part)
        made.append(own_group.make(dist.group.WORLD, ours))
    if rank < 2:
        half = dist.new_group([0, 1], use_local_synchronization=True)
        made.append(own_group.make(half))
    made.append(own_group.make(dist.group.WORLD))
    for group in made:
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [float(group.size())] * 3
