"""Signals in a rank that waits: Ctrl+C and SIGTERM end each kind of wait of both bindings.

Rank 0 waits for rank 1, which comes when rank 0 has had the signal. What the handler raises reaches
the caller, the other rank gets an error that says why, and both can close the group.
"""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.horovod as hvd
from pycomm import backend
from pycomm.communicator import Communicator, Store
from pycomm.local_sgd import Quorum, Streamed
from tests.torch.interpreter import Interpreter
from tests.torch.pool import on_ranks

LONG = 300.0  # seconds: the limit of every wait, which none of them may reach
Wait = Callable[[], object]
RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


def handler(number: int, frame: object) -> None:
    raise RAISED[signal.Signals(number)]


@contextmanager
def signalled(number: int) -> Iterator[None]:
    """Send this process a signal while the block waits, and expect what its handler raises."""
    before = signal.signal(number, handler)  # a shell may start its jobs deaf to SIGINT
    timer = threading.Timer(0.4, os.kill, (os.getpid(), number))
    timer.start()
    try:
        with pytest.raises(RAISED[signal.Signals(number)]):
            yield
    finally:
        timer.join()
        signal.signal(number, before)


def large() -> torch.Tensor:
    return torch.ones(1 << 22)


# ------------------------------------------------------------------ without torch


def communicator(rank: int, store: str, **options: Any) -> Communicator:
    return Communicator(Store.file(store), rank, 2, timeout=LONG, **options)


def core_all_reduce(rank: int, store: str) -> Wait:
    group, values = communicator(rank, store), array("f", [1.0] * 100)
    return lambda: group.all_reduce(values)


def core_all_reduce_by_tcp(rank: int, store: str) -> Wait:
    group, values = communicator(rank, store, transport="tcp"), array("f", [1.0] * 100_000)
    return lambda: group.all_reduce(values)


def core_all_gather(rank: int, store: str) -> Wait:
    group = communicator(rank, store, algo="ring")
    return lambda: group.all_gather(array("f", [1.0] * 10), array("f", [0.0] * 20))


def core_barrier(rank: int, store: str) -> Wait:
    return communicator(rank, store).barrier


def core_recv(rank: int, store: str) -> Wait:
    group = communicator(rank, store)
    return lambda: group.recv(array("f", [0.0] * 10), 1 - rank).wait(LONG)


def core_send(rank: int, store: str) -> Wait:
    group = communicator(rank, store)
    return lambda: group.send(array("f", [0.0] * (1 << 20)), 1 - rank).wait(LONG)


def core_beside_a_thread(rank: int, store: str) -> Wait:
    """The main thread waits for the end of another thread's call."""
    group = communicator(rank, store)

    def wait() -> None:
        if rank == 0:
            entered = threading.Event()

            def other() -> None:
                entered.set()
                with pytest.raises(pycomm.Error):
                    group.barrier()

            thread = threading.Thread(target=other)
            thread.start()
            entered.wait(LONG)
            threading.Event().wait(0.1)
            try:
                group.barrier()
            finally:
                thread.join(LONG)
                assert not thread.is_alive()
        group.barrier()

    return wait


def core_start(rank: int, store: str) -> Wait:
    return lambda: communicator(rank, store)


def core_start_by_tcp(rank: int, store: str) -> Wait:
    return lambda: communicator(rank, store, transport="tcp")


CORE = [
    core_all_reduce,
    core_all_reduce_by_tcp,
    core_all_gather,
    core_barrier,
    core_recv,
    core_send,
    core_beside_a_thread,
    core_start,
    core_start_by_tcp,
]


def check_core(rank: int, size: int, store: dist.Store, place: int, number: int, to: str) -> None:
    play(rank, number, store, CORE[place](rank, to))


def twice(wait: Wait) -> None:
    """What rank 0 has sent before may suffice for the first call."""
    wait()
    wait()


def play(rank: int, number: int, store: dist.Store, wait: Wait) -> None:
    if rank == 0:
        with signalled(number):
            wait()
        store.set("signalled", "")
    else:
        store.wait(["signalled"], timedelta(seconds=30))
        with pytest.raises(RuntimeError) as caught:
            twice(wait)
        raised = RAISED[signal.Signals(number)].__name__
        # A group that a thread has to itself is aborted by the thread that waits for it.
        text = str(caught.value)
        assert raised in text or "rank 0 called abort()" in text, text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", CORE)
def test_a_signal_ends_a_wait_without_torch(pool, tmp_path, kind, number):
    (tmp_path / "group").mkdir(mode=0o700)
    to = str(tmp_path / "group")
    pool.run(check_core, CORE.index(kind), number, to, backend=None)


def check_store(rank: int, size: int, store: dist.Store, folder: str) -> None:
    for each in (Store.local(), Store.file(folder)):
        with signalled(signal.SIGINT):
            each.get("nobody sets this", LONG)


def test_a_signal_ends_the_wait_for_a_value(pool, tmp_path):
    pool.run(check_store, str(tmp_path), ranks=1, backend=None)


# ------------------------------------------------------------------ torch's functions


def all_reduce(rank: int) -> Wait:
    return lambda: dist.all_reduce(torch.ones(10))


def asynchronous(rank: int) -> Wait:
    return lambda: dist.all_reduce(torch.ones(10), async_op=True).wait()


def behind_asynchronous(rank: int) -> Wait:
    """A synchronous operation waits for its turn."""

    def wait() -> None:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        try:
            dist.all_reduce(torch.ones(10))
        finally:
            with pytest.raises(pycomm.Error):
                work.wait()

    return wait


def barrier(rank: int) -> Wait:
    return dist.barrier


def objects(rank: int) -> Wait:
    return lambda: dist.all_gather_object([None, None], rank)


def receive(rank: int) -> Wait:
    return lambda: dist.recv(torch.ones(10), 1 - rank)


def receive_from_any(rank: int) -> Wait:
    return lambda: dist.recv(torch.ones(10))


def send(rank: int) -> Wait:
    return lambda: dist.send(large(), 1 - rank)


def pending_works(rank: int) -> Wait:
    def wait() -> None:
        work = dist.irecv(torch.ones(10), 1 - rank)
        assert work is not None
        dist.group.WORLD._wait_for_pending_works()  # type: ignore[union-attr]
        work.wait()  # the other rank's

    return wait


def new_group(rank: int) -> Wait:
    return lambda: dist.new_group([0, 1])


def shutdown(rank: int) -> Wait:
    """The end of a group waits for what was issued."""

    def wait() -> None:
        dist.all_reduce(torch.ones(10), async_op=True)
        if rank == 0:
            backend.find().shutdown()  # type: ignore[union-attr]
        dist.barrier()

    return wait


TORCH = [
    all_reduce,
    asynchronous,
    behind_asynchronous,
    barrier,
    objects,
    receive,
    receive_from_any,
    send,
    pending_works,
    new_group,
    shutdown,
]

# ------------------------------------------------------------------ training


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))


def ddp(rank: int, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(), **options)


def backward(net: nn.Module) -> None:
    net(torch.ones(2, 64)).sum().backward()


def plain_ddp(rank: int) -> Wait:
    net = ddp(rank)
    backward(net)
    return lambda: backward(net)


def find_unused(rank: int) -> Wait:
    net = ddp(rank, find_unused_parameters=True)
    backward(net)
    return lambda: backward(net)


def compressed(rank: int, codec: str = "int4") -> Wait:
    net = ddp(rank)
    pycomm.compress(net, codec)
    backward(net)
    return lambda: backward(net)


def compressed_by_factors(rank: int) -> Wait:
    return compressed(rank, "powersgd:2")


def coded(rank: int, make: Callable[..., torch.optim.Optimizer]) -> Wait:
    net = ddp(rank)
    optimizer = pycomm.code_optimizer(make(net.parameters()), net, "int4")

    def step() -> None:
        optimizer.zero_grad()
        backward(net)
        optimizer.step()

    step()
    return step


def coded_adamw(rank: int) -> Wait:
    return coded(rank, torch.optim.AdamW)


def coded_sgd(rank: int) -> Wait:
    return coded(rank, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def local_steps(rank: int, **options: Any) -> Wait:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    weight = {"weight": 1.0} if options.get("weighted") else {}
    local = pycomm.LocalSGD(net, every=1, **options)

    def train() -> None:
        for _ in range(3):  # more than an exchange may take
            backward(net)
            optimizer.step()
            local.step(**weight)

    return train


def local_sgd(rank: int) -> Wait:
    return local_steps(rank)


def local_sgd_in_streams(rank: int) -> Wait:
    return local_steps(rank, weighted=True, exchange=Streamed(overlap=1))


def local_sgd_with_a_quorum(rank: int) -> Wait:
    return local_steps(rank, exchange=Quorum(2))


def horovod(rank: int) -> Wait:
    net = model()
    hvd.init()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())

    def step() -> None:
        backward(net)
        optimizer.step()

    step()
    return step


TRAINING = [
    plain_ddp,
    find_unused,
    compressed,
    compressed_by_factors,
    coded_adamw,
    coded_sgd,
    local_sgd,
    local_sgd_in_streams,
    local_sgd_with_a_quorum,
    horovod,
]


@on_ranks(2, timeout=LONG)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", [each.__name__ for each in (*TORCH, *TRAINING)])
def test_a_signal_ends_a_wait(rank, size, kind, number):
    wait: Wait = globals()[kind](rank)
    play(rank, number, dist.distributed_c10d._get_default_store(), wait)


# ------------------------------------------------------------------ processes that end by it

AT_EXIT = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
rank, number, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
signal.signal(signal.SIGINT, signal.default_int_handler)
dist.init_process_group("pycomm", init_method="file://" + store, rank=rank, world_size=2)
dist.barrier()
if rank == 0:
    threading.Timer(0.4, os.kill, (os.getpid(), number)).start()
else:
    time.sleep(2)
work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
dist.all_reduce(torch.ones(5))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_without_a_handler_ends_the_process(tmp_path, number):
    ranks = [
        Interpreter("-c", AT_EXIT, str(r), str(int(number)), str(tmp_path / "store"), autoload=True)
        for r in range(2)
    ]
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert all(rank.returncode != 0 for rank in ranks)
    assert not any("terminate" in text or "Fatal" in text for text in texts), texts
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in texts[0]
        assert "rank 0 was aborted" in texts[1] or "rank 0 was interrupted" in texts[1]
    else:
        assert "PeerLost" in texts[1]
