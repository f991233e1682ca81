"""abort() ends everything in bounded time, and no error leaves a thread or a file behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pycomm.errors import Error
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt, run

# Seconds from abort() to the end of a wait. Waits poll every few milliseconds; a busy machine may
# take longer to schedule them.
BOUND = 2.0

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


@each_value
@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("by", ["same rank", "other rank"])
def test_abort_unblocks_everybody(way, wait, by):
    stopped, ended = [], []
    over = threading.Event()

    def stop(c):
        stopped.append(time.monotonic())
        c.abort("the user pressed stop")

    def job(c):
        if c.rank == 1:
            if by == "other rank":
                time.sleep(0.05)
                stop(c)
            over.wait(10)
            with pytest.raises(Error, match="the user pressed stop"):
                two_barriers(c)
            return None
        if by == "same rank":
            threading.Timer(0.05, stop, (c,)).start()
        with pytest.raises(Error, match="the user pressed stop"):
            WAITS[wait](c)
        ended.append(time.monotonic())
        over.set()
        with pytest.raises(Error, match="the user pressed stop"):
            c.barrier()

    run(2, job, **WAYS[way])
    assert ended[0] - stopped[0] < BOUND


def test_abort_unblocks_a_rank_that_is_alone():
    def job(c):
        threading.Timer(0.05, c.abort, ("the user pressed stop",)).start()
        with pytest.raises(Error, match="the user pressed stop"):
            c.recv(np.ones(10), 0).wait(10)

    run(1, job)


def test_abort_twice_and_after_an_error_is_harmless():
    def job(c):
        c.abort("first")
        c.abort("second")
        with pytest.raises(Error, match="first"):
            c.barrier()
        c.abort("third")
        with pytest.raises(Error, match="first"):
            c.barrier()

    run(1, job)


def held():
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps").read_text()
    return threads, files, maps.count("/dev/zero") + maps.count("memfd:")  # shared memory


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
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
    end = time.monotonic() + 5
    while held() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert held() == before
