"""A process that dies is detected at once, and named, by every rank."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost, Timeout
from tests.extent import each_pair, each_value
from tests.ranks import attempt, on_processes, run_processes
from tests.soak.held import descriptors

# Seconds, as the design promises. The promise is that no wait for a dead rank lasts longer, but a
# busy machine may delay this process: the fastest of three tries counts.
NOTICED = 0.5
TRIES = 3


def until_lost(c):
    """Call until a rank is lost; return its rank, the error text, and the time."""
    try:
        c.barrier()
        while True:
            c.all_reduce(np.ones(50_000))
    except PeerLost as error:
        return error.rank, str(error), time.time()


@each_pair
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["auto", "direct"])
@pytest.mark.parametrize("state", ["in a call", "between calls"])
def test_a_killed_rank_is_named_by_all_at_once(tmp_path, transport, way, state):
    victim, ranks = 1, 3
    stamp = tmp_path / "stamp"

    def job(c):
        if c.rank != victim:
            return until_lost(c)
        c.barrier()
        if state == "in a call" and os.fork() != 0:
            c.recv(np.empty(1), 0).wait()
        elif state == "in a call":  # the child kills the parent, which waits in the call above
            time.sleep(0.1)
        stamp.write_text(repr(time.time()))
        os.kill(os.getpid() if state == "between calls" else os.getppid(), signal.SIGKILL)
        os._exit(0)

    took = []
    while len(took) < TRIES and min(took, default=NOTICED) >= NOTICED:
        first, _, third = run_processes(ranks, job, transport=transport, algo=way)
        for lost, text, _ in (first, third):
            assert lost == victim
            assert f"rank {victim}" in text
        took.append(max(first[2], third[2]) - float(stamp.read_text()))
    assert min(took) < NOTICED


def is_alive(process: int) -> bool:
    """Return whether a process lives; its first thread is a zombie before its files are closed."""
    folder = Path(f"/proc/{process}")
    try:
        dead = (folder / "stat").read_text().split()[2] == "Z"
        return not dead or len(list((folder / "task").iterdir())) > 1
    except OSError:
        return False


def test_of_two_deaths_the_first_is_named():
    """The second rank may have left because of the first."""

    def job(c):
        processes = np.zeros(3, np.int64)
        c.all_gather(np.array([os.getpid()]), processes)
        if c.rank == 0:
            while is_alive(processes[2]):
                time.sleep(0.001)
        if c.rank != 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as lost:
            c.recv(np.zeros(1), 0).wait()
        return lost.value.rank, str(lost.value)

    _, (rank, text), _ = run_processes(3, job, transport="tcp")
    assert rank == 2, text


@each_value
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["recv", "broadcast"])
def test_who_waits_for_one_of_two_dead_ranks_alone_hears_of_it(transport, call):
    """This rank needs nothing from the other dead rank, whose death is no reason to stop."""

    def job(c):
        processes = np.zeros(3, np.int64)
        c.all_gather(np.array([os.getpid()]), processes)
        if c.rank != 1:
            c.send(np.zeros(1), 1, tag=1).wait()
            c.recv(np.zeros(1), 1, tag=1).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):  # both ranks have all that they need from each other
            c.recv(np.zeros(1), tag=1).wait()
        for rank in (0, 2):
            c.send(np.zeros(1), rank, tag=1).wait()
        while is_alive(processes[0]) or is_alive(processes[2]):
            time.sleep(0.001)
        wait = {
            "recv": lambda: c.recv(np.zeros(1), 2).wait(2.0),
            "broadcast": lambda: c.broadcast(np.zeros(1), 2, timeout=2.0),
        }
        with pytest.raises(PeerLost) as lost:
            wait[call]()
        return lost.value.rank, lost.value.ranks

    _, (rank, ranks), _ = run_processes(3, job, transport=transport, algo="direct")
    assert rank in (0, 2)
    assert ranks == [0, 2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_left_before_its_process_ended_has_not_died(transport):
    def job(c):
        c.barrier()
        if c.rank == 0:
            time.sleep(0.3)  # the process of rank 1 has ended
            with pytest.raises(PeerLost, match=r"rank 1 .*left the group") as lost:
                c.all_reduce(np.ones(3))
            assert "died" not in str(lost.value)

    run_processes(2, job, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_leaves_after_the_last_call_harms_nobody(transport, ranks):
    def job(c):
        x = np.full(1000, c.rank, np.float32)
        c.all_reduce(x)
        c.broadcast(x, 0)
        if c.rank == 0:
            return x[0]
        time.sleep(0.02)
        return x[0]

    for _ in range(5):
        assert attempt(ranks, job, transport=transport) == [sum(range(ranks))] * ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_is_left_can_go_on_point_to_point(transport):
    """A rank that has done its part may leave while the others still communicate."""

    def job(c):
        x = np.zeros(1)
        if c.rank == 2:
            c.send(x, 0, tag=1).wait()
            return None
        if c.rank == 0:
            c.recv(x, tag=1).wait()
            time.sleep(0.1)
        for _ in range(10):
            if c.rank == 0:
                c.send(x + 1, 1).wait()
                c.recv(x, 1).wait()
            else:
                c.recv(x, 0).wait()
                c.send(x, 0).wait()
        return x[0]

    assert attempt(3, job, transport=transport) == [10, 10, None]


# ------------------------------------------------------------------------------------------ stopped
# A rank that is stopped in the middle of a collective until the others have given up, and goes on.
#
# It must hear that the group is over, whatever it has read meanwhile; and what it still writes must
# not reach memory that the others use again.


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


# A call, its buffers, and what the last of them holds on the victim where the call ends well.
CALLS = {
    "all_reduce": (lambda c, x, wide, out: c.all_reduce(x), ["x"], OLD + 2),
    "broadcast": (lambda c, x, wide, out: c.broadcast(x, ROOT), ["x"], OLD),
    "all_gather": (lambda c, x, wide, out: c.all_gather(x, out), ["x", "out"], OLD),
    "reduce_scatter": (lambda c, x, wide, out: c.reduce_scatter(wide, x), ["wide", "x"], OLD + 2),
    "all_to_all": (lambda c, x, wide, out: c.all_to_all(wide, out), ["wide", "out"], OLD),
    "scatter": (lambda c, x, wide, out: c.scatter(wide, x, ROOT), ["wide", "x"], OLD),
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
    call, needs, right = CALLS[name]
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
        got = dict(zip(("x", "wide", "out"), arrays, strict=True))[needs[-1]]
        return say.send((outcome, bool((got[:NUMEL] == right).all())))
    c.close()
    if outcome is not None:
        for array in arrays:
            array[:] = NEW
    say.send(outcome)
    say.recv()  # the victim has gone on and has ended
    say.send(outcome is None or all((array == NEW).all() for array in arrays))


def is_stopped(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def piped(main, *args):
    """Run ``main(rank, folder, *args, pipe)`` on two forked processes; give them and our ends."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=main, args=(r, folder, *args, pipes[r][1])) for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        try:
            yield ranks, [pipe[0] for pipe in pipes]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def play(name, heap, seconds):
    """Stop the victim in the call; return what became of (rank 0, the victim, rank 0's memory)."""
    with piped(rank_main, name, heap, seconds) as (ranks, said):
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


@each_value
@pytest.mark.parametrize("heap", [True, False], ids=["heap", "private"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_goes_on_late_neither_succeeds_nor_writes(name, heap):
    stopped_inside = False
    for number in range(ATTEMPTS):
        # The kernel looks at such timers at its ticks, milliseconds apart; a call takes several.
        first, (second, right), kept = play(name, heap, 1e-3 * (1 + number % 20))
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
    with piped(late_rank_main) as (ranks, said):
        assert said[VICTIM].recv() == "waits"
        time.sleep(0.5)  # it is in its barrier, which lacks rank 0 alone
        os.kill(ranks[VICTIM].pid, signal.SIGSTOP)
        said[ROOT].send("go on")
        assert said[ROOT].recv() == "has aborted"
        os.kill(ranks[VICTIM].pid, signal.SIGCONT)
        assert said[VICTIM].poll(20)
        assert said[VICTIM].recv() == "ends well"
        assert "a step that failed" in said[VICTIM].recv()


@on_processes(2)
def test_an_abort_counts_from_its_start(c):
    """What is seen of rank 1 if it is stopped between the start of an abort and its reason."""
    if c.rank == 1:
        c.barrier()
        for number, target in descriptors().items():
            if "memfd:pycomm" in target:
                with mmap.mmap(number, mmap.PAGESIZE) as header:
                    header[:4] = (1 * 4 + 1).to_bytes(4, "little")  # its place, writing

    def calls():
        if c.rank == 0:
            c.barrier()
            time.sleep(0.5)
        c.all_reduce(np.ones(1000, np.float32))

    with pytest.raises(Error, match="rank 1 aborted the group, but its reason did not arrive"):
        calls()
