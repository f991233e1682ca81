"""Zero copy: collectives on memory that all ranks can access, also mixed with private memory."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from pycomm import _test
from pycomm.errors import Error
from tests.collectives.ways import RANKS, bits, check_everything, floats, integers, right, shared
from tests.extent import each_value, part
from tests.ranks import in_child, on_processes, run, run_processes

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


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_in_place_has_the_bits_of_other_ways(ranks, op):
    def sums(c, place=lambda c, x: x):
        results = []
        for n in SIZES:
            x = place(c, floats(c.rank, n))
            c.all_reduce(x, op)
            results.append(bits(x))
        return results

    in_place, plain = zip(*run(ranks, lambda c: (sums(c, shared), sums(c))), strict=True)
    assert in_place == plain
    assert [*plain] == run(ranks, sums, algo="direct")


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

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
