"""A forked child (a data loader's worker, say) may drop its copy of a group; the group goes on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from pycomm import _C
from pycomm.communicator import Communicator, Store


def exit_status_of_child(body) -> int:
    """Of a child that runs body() and ends; one that hangs is killed."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def two_ranks(folder, transport: str) -> list[Communicator]:
    store, ranks = Store.file(str(folder)), [None, None]

    def join(rank: int) -> None:
        ranks[rank] = Communicator(store, rank, 2, transport=transport, timeout=20.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_child_drops_its_copy_and_the_group_goes_on(tmp_path, transport):
    groups = two_ranks(tmp_path, transport)
    data, got = np.arange(5.0), np.zeros(5)
    request = groups[1].recv(got, 0)
    time.sleep(0.05)  # by now a thread of the group waits for it

    def drop() -> None:
        groups[0].abort("a child has no say")
        groups.clear()
        gc.collect()

    assert exit_status_of_child(drop) == 0
    groups[0].send(data, 1).wait()
    request.wait()
    assert (got == data).all()


def test_a_child_drops_its_copy_of_a_queue():
    queue, done = _C.Queue(), threading.Event()
    queue.submit(done.set)
    assert done.wait(10)
    held = [queue]
    del queue

    def drop() -> None:
        held.clear()
        gc.collect()

    assert exit_status_of_child(drop) == 0
    held[0].submit(done.set)
