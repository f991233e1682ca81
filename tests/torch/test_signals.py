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

import pycomm
from pycomm import backend
from pycomm.communicator import Communicator, Store
from tests.extent import each_value
from tests.torch.interpreter import run_ranks
from tests.torch.pool import on_ranks
from tests.torch.ways import WAYS, Way

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


# ------------------------------------------------------------------ without torch


def communicator(rank: int, store: str, **options: Any) -> Communicator:
    return Communicator(Store.file(store), rank, 2, timeout=LONG, **options)


def beside_a_thread(group: Communicator, peer: int) -> None:
    """The main thread waits for the end of another thread's call."""
    if peer == 1:
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


def floats(numel: int) -> array[float]:
    return array("f", [1.0] * numel)


def of_group(
    call: Callable[[Communicator, int], object], **options: Any
) -> Callable[[int, str], Wait]:
    """Return what makes a group, and returns a call of it: ``call(group, other rank)``."""

    def make(rank: int, store: str) -> Wait:
        group = communicator(rank, store, **options)
        return lambda: call(group, 1 - rank)

    return make


CORE: dict[str, Callable[[int, str], Wait]] = {
    "all_reduce": of_group(lambda group, _: group.all_reduce(floats(100))),
    "all_reduce by TCP": of_group(
        lambda group, _: group.all_reduce(floats(100_000)), transport="tcp"
    ),
    "all_gather": of_group(lambda group, _: group.all_gather(floats(10), floats(20)), algo="ring"),
    "barrier": of_group(lambda group, _: group.barrier()),
    "recv": of_group(lambda group, peer: group.recv(floats(10), peer).wait(LONG)),
    "send": of_group(lambda group, peer: group.send(floats(1 << 20), peer).wait(LONG)),
    "beside a thread": of_group(beside_a_thread),
    "start": lambda rank, store: lambda: communicator(rank, store),
    "start by TCP": lambda rank, store: lambda: communicator(rank, store, transport="tcp"),
}


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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "group").mkdir(mode=0o700)
    return str(tmp_path / "group")


@on_ranks(2, backend=None)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", CORE)
def test_a_signal_ends_a_wait_without_torch(rank, size, store, kind, number, folder):
    play(rank, number, store, CORE[kind](rank, folder))


@on_ranks(1, backend=None)
def test_a_signal_ends_the_wait_for_a_value(rank, size, store, folder):
    for each in (Store.local(), Store.file(folder)):
        with signalled(signal.SIGINT):
            each.get("nobody sets this", LONG)


# ------------------------------------------------------------------ torch's functions


def behind_asynchronous(rank: int) -> None:
    """A synchronous operation waits for its turn."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    try:
        dist.all_reduce(torch.ones(10))
    finally:
        with pytest.raises(pycomm.Error):
            work.wait()


def shutdown(rank: int) -> None:
    """The end of a group waits for what was issued."""
    dist.all_reduce(torch.ones(10), async_op=True)
    if rank == 0:
        backend.find().shutdown()  # type: ignore[union-attr]
    dist.barrier()


TORCH: dict[str, Callable[[int], object]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(10)),
    "asynchronous": lambda rank: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    "behind an asynchronous one": behind_asynchronous,
    "barrier": lambda rank: dist.barrier(),
    "objects": lambda rank: dist.all_gather_object([None, None], rank),
    "receive": lambda rank: dist.recv(torch.ones(10), 1 - rank),
    "receive from any": lambda rank: dist.recv(torch.ones(10)),
    "send": lambda rank: dist.send(torch.ones(1 << 22), 1 - rank),
    "new_group": lambda rank: dist.new_group([0, 1]),
    "shutdown": shutdown,
}

# ------------------------------------------------------------------ training


def training(way: Way) -> Wait:
    torch.manual_seed(0)
    begun = way(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))

    def train() -> None:
        for _ in range(6):  # more than an exchange of LocalSGD may take
            begun.step(lambda model: model(torch.ones(2, 64)).sum())

    if not isinstance(begun.state, pycomm.LocalSGD):
        train()
    return train


@on_ranks(2, timeout=LONG)
@each_value
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", [*TORCH, *WAYS])
def test_a_signal_ends_a_wait(rank, size, kind, number):
    wait = partial(TORCH[kind], rank) if kind in TORCH else training(WAYS[kind])
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
    words = [str(int(number)), str(tmp_path / "store")]
    ranks = run_ranks("-c", AT_EXIT, words=words, autoload=True)
    texts = [rank.stderr for rank in ranks]
    assert all(rank.returncode != 0 for rank in ranks)
    assert not any("terminate" in text or "Fatal" in text for text in texts), texts
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in texts[0]
        assert "rank 0 was aborted" in texts[1] or "rank 0 was interrupted" in texts[1]
    else:
        assert "PeerLost" in texts[1]
