"""cma (process_vm_readv): the kernel copies large buffers of peers once, with the same results."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from functools import cache

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import Error, PeerLost
from tests.collectives.ways import calls, check_everything, floats, integers, right
from tests.extent import FULL, each_value
from tests.ranks import run, run_processes

RANKS = [2, 3, 4]
# Elements per rank, in float32: below the sizes at which cma begins, above all of them, and several
# blocks. None is a whole number of cache lines per rank.
SIZES = [1001, 40_003, 700_001, *([1_900_003] if FULL else [])]
LARGEST = 4_300_007


def digest(*arrays):
    return [_C.crc32c(x.tobytes()) for x in arrays]


def everything(c, who=lambda rank: False):
    """Check every collective of whole numbers; return digests of sums that depend on their order.

    The buffers of `who` lie in heaps.
    """
    check_everything(c, right(c.size, tuple(SIZES)), who)
    sums = []
    for n in SIZES:
        for op in ("sum", "avg", "max"):
            x = floats(c.rank, n)
            c.all_reduce(x, op)
            sums.append(digest(x))
        for dtype in ("uint8", "float64", "int64"):
            x = integers(c.rank, n, dtype)
            c.all_reduce(x)
            sums.append(digest(x))
    part = -(-LARGEST // c.size)
    x, y = floats(c.rank, part * c.size), np.zeros(part, np.float32)
    c.reduce_scatter(x, y)
    return [*sums, digest(y)]


@cache
def through_staging(ranks):
    """Return every result of ranks that are threads, which use staging."""
    return run(ranks, everything)


@pytest.mark.parametrize("ranks", RANKS)
def test_same_bits_as_through_staging(ranks):
    staged = through_staging(ranks)  # first, so that the forked ranks have the inputs
    assert run_processes(ranks, everything) == staged


def test_ranks_on_one_core_wait_for_sums():
    """One of them is done with its part before the other has begun its own."""

    def on_one_core(c):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        sums = []
        for n in range(700_001, 700_009):
            x = integers(c.rank, n, "int64")
            c.all_reduce(x)
            sums.append(digest(x))
        return sums

    assert run_processes(2, on_one_core) == run(2, on_one_core)


@each_value
@pytest.mark.parametrize("who", ["one", "all but one"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_same_bits_where_some_lie_in_heaps(ranks, who):
    def mixed(c):
        return everything(c, lambda rank: (rank == 1) == (who == "one"))

    staged = through_staging(ranks)
    assert run_processes(ranks, mixed) == staged


def staged_bytes(c, numel=1_000_000):
    """Return the bytes that each collective of a large buffer puts into staging."""
    c.barrier()  # after this, all ranks know which ranks can read which
    counts = {}
    every = calls(c, numel, dtype="float64")
    del every["reduce"]  # which copies
    for name, call in every.items():
        before = c.sent_bytes()
        call()
        counts[name] = c.sent_bytes() - before
    return counts


def may_read_itself_in_a_child():
    """Return whether processes of one user may read each other, so that ranks do."""
    word = ctypes.c_uint64(0x1234)
    child = os.fork()
    if child == 0:
        seen = ctypes.c_uint64()

        class Range(ctypes.Structure):
            _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

        local = Range(ctypes.addressof(seen), 8)
        remote = Range(ctypes.addressof(word), 8)
        libc = ctypes.CDLL(None)
        libc.process_vm_readv(os.getppid(), *(ctypes.byref(local), 1, ctypes.byref(remote), 1), 0)
        os._exit(0 if seen.value == word.value else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


needs_reading = pytest.mark.skipif(
    not may_read_itself_in_a_child(), reason="here no process may read another's memory"
)


@needs_reading
@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_large_goes_through_staging(ranks):
    """With more than two ranks, cma is used only where it is faster."""
    staged = set() if ranks == 2 else {"all_reduce", "all_gather", "broadcast"}
    for rank, counts in enumerate(run_processes(ranks, staged_bytes)):
        expected = staged if rank == 0 else staged - {"broadcast"}
        assert {name for name, count in counts.items() if count} == expected


PR_SET_DUMPABLE = 4
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
CAPABILITIES_3 = 0x20080522


def hide():
    """Forbid other processes of this user to read this process's memory from now on."""
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def drop_rights():
    """Drop all capabilities: then even root may not read processes that have some."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)
    assert ctypes.CDLL(None).syscall(SYS_CAPSET, header, (ctypes.c_uint32 * 6)()) == 0


def test_where_reading_is_forbidden_staging_is_used():
    """If one pair of ranks cannot read, no rank reads."""

    def job(c):
        return everything(c), staged_bytes(c)

    def forbidden(rank):
        if rank == 1:
            hide()
        elif rank == 2:
            drop_rights()

    staged = through_staging(3)
    outcomes = run_processes(3, job, prepare=forbidden)
    assert [bits for bits, _ in outcomes] == staged
    for _, counts in outcomes:
        assert counts["all_reduce"] > 0
        assert counts["all_to_all"] > 0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_a_rank_that_dies_while_it_is_read_is_named(op):
    def job(c):
        x, out = np.ones(c.size * 300_000), np.ones(c.size * c.size * 300_000)
        if c.rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                if op == "all_reduce":
                    c.all_reduce(x)
                else:
                    getattr(c, op)(x, out if op == "all_gather" else out[: len(x)])
        except PeerLost as lost:
            return lost.rank, str(lost)

    first, second = run_processes(2, job)
    assert second is None
    assert first[0] == 1
    assert "rank 1" in first[1]


@needs_reading
def test_memory_that_cannot_be_read_is_named():
    def job(c):
        c.barrier()
        memory = mmap.mmap(-1, 16 << 20)
        x = np.frombuffer(memory, np.float32)
        if c.rank == 1:
            middle = x.ctypes.data + (8 << 20)
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(middle), 4096, 0) == 0
        with pytest.raises(Error) as caught:
            c.broadcast(x, 1)
        return str(caught.value)

    for text in run_processes(2, job):
        assert "cannot read the memory of rank 1" in text


def test_threads_do_not_read_their_own_process():
    for counts in run(2, staged_bytes):
        assert counts["all_reduce"] > 0
