"""Zero copy: collectives on memory of a heap that all ranks can access, and on private memory that
the kernel copies once (process_vm_readv); also mixed."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import threading
import time
from functools import cache

import numpy as np
import pytest

from pycomm import _C, _test
from pycomm.errors import Error, PeerLost
from tests.collectives.ways import (
    RANKS,
    calls,
    check_everything,
    floats,
    integers,
    right,
    shared,
)
from tests.extent import FULL, each_value, part
from tests.ranks import good, in_child, on_processes, on_threads, run, run_processes

# In-place operation begins at 2 KiB; one slot is 128 KiB, and a call that needs more than four of
# them uses some again.
SIZES = [0, 1, 511, 512, 1000, 4099, 40001, 170003]
# The ranks whose data lie in their heap.
WHO = {
    "all": lambda rank: True,
    "some": lambda rank: rank % 2 == 0,
    "one": lambda rank: rank == 1,
    "none": lambda rank: False,
}
PAGE = 4096


@each_value
@pytest.mark.parametrize(
    ("ranks", "who"),
    [(ranks, who) for place, ranks in enumerate(RANKS) for who in part([*WHO], 2, place)],
)
def test_every_collective(who, ranks):
    results = right(ranks, tuple(SIZES))
    assert all(run(ranks, lambda c: check_everything(c, results, WHO[who])))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_between_processes(ranks):
    results = right(ranks, (1000, 40001))

    def everything(c):
        return all(check_everything(c, results, who) for who in WHO.values())

    assert all(run_processes(ranks, everything))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int64", "bool", "complex128"])
def test_every_kind_of_dtype(dtype):
    def job(c):
        array = c.allocate(3000, dtype)
        view = memoryview(array).cast("B")
        view[:] = bytes(len(view))
        view[c.rank] = 1
        c.all_reduce(array)
        return array.dtype, len(array), bytes(view)

    first, second = run(2, job)
    assert first == second
    assert first[:2] == (dtype, 3000)
    assert any(first[2])


def test_in_place_nothing_goes_through_staging():
    def job(c):
        counts = []
        for x in (shared(c, integers(c.rank, 100000)), integers(c.rank, 100000)):
            before = c.sent_bytes()
            c.all_reduce(x)
            c.all_gather(x, np.empty(200000, np.float32))
            c.broadcast(x)
            counts.append(c.sent_bytes() - before)
        return counts

    assert run(2, job) == [[0, 1200000], [0, 800000]]


def address(array):
    return np.asarray(array).ctypes.data


def test_a_freed_block_is_used_again():
    def job(c):
        first = c.allocate(100000)
        place = address(first)
        assert place % PAGE == 0
        assert _test.heap_bytes(c.core) == (98 * PAGE, 0)
        assert address(c.allocate(3)) % 64 == 0
        del first
        gc.collect()
        assert _test.heap_bytes(c.core)[0] == 0
        second = shared(c, np.full(100000, c.rank + 1, np.float32))
        assert second.ctypes.data == place
        c.all_reduce(second)
        return set(second.tolist())

    assert run(2, job) == [{3.0}] * 2


def test_blocks_never_overlap():
    def job(c):
        random = np.random.default_rng(c.rank)
        blocks = {}
        for i in range(600):
            if blocks and random.random() < 0.45:
                key = list(blocks)[random.integers(len(blocks))]
                assert (blocks.pop(key) == key).all()
            else:
                blocks[i] = shared(c, np.full(int(2 ** random.uniform(0, 16)), i))
        assert all((block == key).all() for key, block in blocks.items())
        assert _test.heap_bytes(c.core)[0] >= sum(block.nbytes for block in blocks.values())
        blocks.clear()
        assert _test.heap_bytes(c.core)[0] == 0

    run(2, job)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_freed_neighbours_are_one_gap(order):
    def job(c):
        blocks = [c.allocate(10 * PAGE // 4) for _ in range(4)]
        begin = address(blocks[0])
        assert address(blocks[3]) == begin + 30 * PAGE
        for freed in order:
            blocks[freed] = None
            gc.collect()
        assert address(c.allocate(29 * PAGE // 4)) == begin

    run(2, job)


def test_many_freed_bytes_go_back_to_the_system():
    def job(c):
        if c.rank == 1:
            return
        big = 400 << 20
        block = c.allocate(big // 4)
        np.asarray(block)[:: PAGE // 4] = 1
        del block
        gc.collect()
        assert _test.heap_bytes(c.core) == (0, 0)
        assert not np.asarray(c.allocate(big // 4))[:: PAGE // 4].any()

    run(2, job)


def test_bytes_beside_released_pages_stay():
    """What goes back ends in the middle of a page, in which another block lies."""

    def job(c):
        if c.rank == 1:
            return
        page = [shared(c, np.full(16, 1.0, np.float32)) for _ in range(PAGE // 64)]
        big = c.allocate((300 << 20) // 4)
        freed, beside = (shared(c, np.full(16, value, np.float32)) for value in (2.0, 3.0))
        assert beside.ctypes.data == freed.ctypes.data + 64 == address(big) + (300 << 20) + 64
        np.asarray(big)[0] = 1
        del freed
        gc.collect()
        del big
        gc.collect()
        assert (beside == 3).all()
        assert all((block == 1).all() for block in page)

    run(2, job)


def test_a_block_outlives_its_group():
    blocks = run(2, lambda c: shared(c, integers(c.rank, 5000)))
    gc.collect()
    for rank, block in enumerate(blocks):
        assert np.array_equal(block, integers(rank, 5000))
        block[:] = 1


def test_a_heap_that_is_full_says_so():
    def job(c):
        with pytest.raises(Error, match=r"the shared heap of this rank is full: .* bytes wanted"):
            c.allocate(1 << 40, "uint8")
        with pytest.raises(Error, match=r"rank \d: no memory holds \d+ elements"):
            c.allocate(1 << 62)

    run(2, job)


def test_without_shared_memory_it_is_ordinary_memory():
    def job(c):
        x = shared(c, np.full(5000, c.rank + 1, np.float32))
        c.all_reduce(x)
        return set(x.tolist())

    assert run(2, job, transport="tcp") == [{3.0}] * 2
    assert run(1, job) == [{1.0}]


def test_threads_allocate_at_once():
    def job(c):
        def churn(seed):
            for i in range(200):
                block = shared(c, np.full(100 * (i % 7 + 1), seed))
                assert (block == seed).all()

        good(on_threads(range(4), churn, 60))
        gc.collect()
        return _test.heap_bytes(c.core)[0]

    assert run(2, job) == [0, 0]


@on_processes(2)
def test_a_forked_child_leaves_the_heap_alone(c):
    block = shared(c, integers(c.rank, 5000))
    used = _test.heap_bytes(c.core)

    def drop():
        nonlocal block
        block = None
        gc.collect()

    assert in_child(lambda: c.allocate(10)) == "refused"
    assert in_child(drop) == "returned"
    assert _test.heap_bytes(c.core) == used
    c.all_reduce(block)
    assert np.array_equal(block, sum(integers(r, 5000) for r in range(c.size)))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_calls_of_all_kinds_may_follow_each_other(ranks):
    """Slots and flags are reused while slow ranks still read, in place and through staging."""
    plan = np.random.default_rng(ranks)
    steps = [
        (plan.integers(6), int(2 ** plan.uniform(0, 16)), plan.random(ranks) < 0.6, slow)
        for slow in plan.integers(0, 5 * ranks, 150)
    ]

    inputs = [integers(r, ranks << 16) for r in range(ranks)]  # to which each step adds its number
    total = sum(inputs)

    def job(c):
        for i, (kind, n, in_heap, slow) in enumerate(steps):
            if slow == c.rank:
                time.sleep(0.001)
            root = i % ranks
            mine = inputs[c.rank][: ranks * n] + i
            x = shared(c, mine) if in_heap[c.rank] else mine
            own = slice(c.rank * n, (c.rank + 1) * n)
            if kind == 0:
                c.all_reduce(x)
                assert np.array_equal(x, total[: ranks * n] + ranks * i), i
            elif kind == 1:
                out = np.empty(n, np.float32)
                c.reduce_scatter(x, out)
                assert np.array_equal(out, total[own] + ranks * i), i
            elif kind == 2:
                out = np.empty(ranks * n, np.float32)
                c.all_gather(x[:n], out)
                assert np.array_equal(out, np.concatenate([w[:n] for w in inputs]) + i), i
            elif kind == 3:
                out = np.empty(ranks * n, np.float32)
                c.all_to_all(x, out)
                assert np.array_equal(out, np.concatenate([w[own] for w in inputs]) + i), i
            elif kind == 4:
                c.broadcast(x, root)
                assert np.array_equal(x, inputs[root][: ranks * n] + i), i
            else:
                out = np.empty(n, np.float32)
                c.scatter(x, out, root)
                assert np.array_equal(out, inputs[root][own] + i), i
            x[:] = -1  # no rank reads it any more

    run(ranks, job)


# ----------------------------------------------------------------------------------- private memory


READERS = [2, 3, 4]
# Elements per rank, in float32: below the sizes at which cma begins, above all of them, and several
# blocks. None is a whole number of cache lines per rank.
READ_SIZES = [1001, 40_003, 700_001, *([1_900_003] if FULL else [])]
LARGEST = 4_300_007


def digest(*arrays):
    return [_C.crc32c(x.tobytes()) for x in arrays]


def everything(c, who=lambda rank: False):
    """Check every collective of whole numbers; return digests of sums that depend on their order.

    The buffers of `who` lie in heaps.
    """
    check_everything(c, right(c.size, tuple(READ_SIZES)), who)
    sums = []
    for n in READ_SIZES:
        for op in ("sum", "avg", "max"):
            x = shared(c, floats(c.rank, n)) if who(c.rank) else floats(c.rank, n)
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


@pytest.mark.parametrize("ranks", READERS)
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
@pytest.mark.parametrize("who", ["one", "all but one", "all"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_same_bits_where_some_lie_in_heaps(ranks, who):
    def mixed(c):
        return everything(c, lambda rank: who == "all" or (rank == 1) == (who == "one"))

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
@pytest.mark.parametrize("ranks", READERS)
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
