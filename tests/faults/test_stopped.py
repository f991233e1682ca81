"""A rank that is stopped in the middle of a collective until the others have given up, and goes on.

It must hear that the group is over, whatever it has read meanwhile; and what it still writes must
not reach memory that the others use again.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, Timeout
from tests.extent import each_value
from tests.ranks import run_processes

NUMEL = 8 << 20  # 32 MiB: long enough to be stopped in
ROOT, VICTIM = 0, 1
OLD, NEW = 1.0, 7.0  # of rank 0's array while it calls, and when it has left
ATTEMPTS = 200  # of which most machines need a few


def buffers(c, heap, numel, needs):
    """Filled arrays in the heap or not: of this size, twice as long, and so long for a result.

    Those that the call does not need are empty, since others take their time to fill.
    """

    def make(name, n, value):
        n = n if name in needs else 0
        array = np.asarray(c.allocate(n)) if heap else np.empty(n, np.float32)
        array[:] = value
        return array

    mine = OLD if c.rank == ROOT else 2.0
    return make("x", numel, mine), make("wide", 2 * numel, mine), make("out", 2 * numel, 0.0)


CALLS = {  # (call, what the victim must hold where it ends well, the buffers of both)
    "all_reduce": (
        lambda c, x, wide, out: c.all_reduce(x),
        lambda x, wide, out: (x, OLD + 2),
        ("x",),
    ),
    "broadcast": (
        lambda c, x, wide, out: c.broadcast(x, ROOT),
        lambda x, wide, out: (x, OLD),
        ("x",),
    ),
    "all_gather": (
        lambda c, x, wide, out: c.all_gather(x, out),
        lambda x, wide, out: (out[:NUMEL], OLD),
        ("x", "out"),
    ),
    "reduce_scatter": (
        lambda c, x, wide, out: c.reduce_scatter(wide, x),
        lambda x, wide, out: (x, OLD + 2),
        ("x", "wide"),
    ),
    "all_to_all": (
        lambda c, x, wide, out: c.all_to_all(wide, out),
        lambda x, wide, out: (out[:NUMEL], OLD),
        ("wide", "out"),
    ),
    "scatter": (
        lambda c, x, wide, out: c.scatter(wide, x, ROOT),
        lambda x, wide, out: (x, OLD),
        ("x", "wide"),
    ),
}


class SignalEvent(ctypes.Structure):
    """struct sigevent, of which a timer reads the number of the signal."""

    _fields_ = (("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("rest", ctypes.c_int * 13))


def stop_after(seconds):
    """Stop this process when it has computed for so long, however many others want its core."""
    libc = ctypes.CDLL(None, use_errno=True)
    event, timer = SignalEvent(signo=signal.SIGSTOP), ctypes.c_void_p()
    when = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
    clock = time.CLOCK_PROCESS_CPUTIME_ID
    assert libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) == 0
    assert libc.timer_settime(timer, 0, when, None) == 0


def rank_main(rank, folder, name, heap, seconds, say):
    call, result, needs = CALLS[name]
    c = Communicator(Store.file(folder), rank, 2, transport="shm", timeout=20)
    arrays = buffers(c, heap, NUMEL, needs)
    c.barrier()
    if rank == VICTIM:
        stop_after(seconds)
    outcome = None
    try:
        c.timeout = 0.4
        call(c, *arrays)
    except Error as error:
        outcome = type(error), str(error)
    if rank == VICTIM:
        got, right = result(*arrays)
        return say.send((outcome, bool((got == right).all())))
    c.close()
    if outcome is not None:
        for array in arrays:
            array[:] = NEW
    say.send(outcome)
    say.recv()  # the victim has gone on and has ended
    say.send(outcome is None or all((array == NEW).all() for array in arrays))


def is_stopped(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def play(name, heap, seconds):
    """Stop the victim in the call; return what became of (rank 0, the victim, rank 0's memory)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=rank_main, args=(r, folder, name, heap, seconds, pipes[r][1]))
            for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        said = [pipe[0] for pipe in pipes]
        try:
            end = time.monotonic() + 30
            while not (is_stopped(ranks[VICTIM]) or said[VICTIM].poll(0.002)):
                assert time.monotonic() < end
            assert said[ROOT].poll(30)
            first = said[ROOT].recv()
            end = time.monotonic() + 30
            while ranks[VICTIM].is_alive() and time.monotonic() < end:
                os.kill(ranks[VICTIM].pid, signal.SIGCONT)  # it may stop after the call
                if said[VICTIM].poll(0.01):
                    break
            second = said[VICTIM].recv()
            said[ROOT].send("go on")
            return first, second, said[ROOT].recv()
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


@each_value
@pytest.mark.parametrize("heap", [True, False], ids=["heap", "private"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_goes_on_late_neither_succeeds_nor_writes(name, heap):
    stopped_inside = False
    for attempt in range(ATTEMPTS):
        # The kernel looks at such timers at its ticks, milliseconds apart; a call takes several.
        first, (second, right), kept = play(name, heap, 1e-3 * (1 + attempt % 20))
        assert kept, "memory of a rank that had left has changed"
        assert second is not None or right, "a call has succeeded with a wrong result"
        if first is not None:
            assert first[0] is Timeout
            assert second is not None, "success, though the other rank has given up"
            stopped_inside = True
            break
    assert stopped_inside, "the victim was never stopped in the middle of its call"


def late_rank_main(rank, folder, say):
    c = Communicator(Store.file(folder), rank, 2, transport="shm", timeout=20)
    c.barrier()
    if rank == VICTIM:
        say.send("waits")
        c.barrier()
        say.send("ends well")
        try:
            c.barrier()
        except Error as error:
            return say.send(str(error))
    say.recv()
    c.barrier()
    c.abort("a step that failed")
    say.send("has aborted")
    say.recv()


def test_an_abort_that_follows_a_call_takes_nothing_from_it():
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=late_rank_main, args=(r, folder, pipes[r][1])) for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        said = [pipe[0] for pipe in pipes]
        try:
            assert said[VICTIM].recv() == "waits"
            time.sleep(0.5)  # it is in its barrier, which lacks rank 0 alone
            os.kill(ranks[VICTIM].pid, signal.SIGSTOP)
            said[ROOT].send("go on")
            assert said[ROOT].recv() == "has aborted"
            os.kill(ranks[VICTIM].pid, signal.SIGCONT)
            assert said[VICTIM].poll(20)
            assert said[VICTIM].recv() == "ends well"
            assert "a step that failed" in said[VICTIM].recv()
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def begin_an_abort(c):
    """What is seen of rank 1 if it is stopped between the start of an abort and its reason."""
    if c.rank == 1:
        c.barrier()
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if os.path.exists(path) and "memfd:pycomm" in os.readlink(path):
                with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as header:
                    header[:4] = (1 * 4 + 1).to_bytes(4, "little")  # its place, writing

    def calls():
        if c.rank == 0:
            c.barrier()
            time.sleep(0.5)
        c.all_reduce(np.ones(1000, np.float32))

    with pytest.raises(Error, match="rank 1 aborted the group, but its reason did not arrive"):
        calls()
    return True


def test_an_abort_counts_from_its_start():
    assert all(run_processes(2, begin_an_abort))
