"""Collectives over shared memory: the right bits on every rank, for any size and order of calls."""

from __future__ import annotations

import time
from functools import cache, lru_cache

import numpy as np
import pytest

from pycomm import _C, _test
from pycomm.errors import Error, Timeout, WireMismatch
from tests.collectives.ways import REDUCIBLE, folded
from tests.extent import each_value
from tests.transports.ranks import RUNNERS

RANKS = [1, 2, 3, 4, 7, 8]
FLOAT32 = _C.DType.float32
# Around the borders of the flag's lines (120 B), one slot (128 KiB) and more of them than the four
# that a rank has.
SIZES = [0, 1, 2, 7, 29, 30, 31, 100, 2047, 2049, 32768, 32769, 70001, 170000]


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@lru_cache(maxsize=32)  # each rank compares with the data of all
def sample(seed: int, nbytes: int) -> np.ndarray:
    """Return random bytes that are finite numbers in every dtype (bytes stay below 0x40)."""
    return np.random.default_rng(seed).integers(0, 64, nbytes, dtype=np.uint8)


def values(dtype: _C.DType, rank: int, numel: int, seed: int = 0) -> np.ndarray:
    data = sample(1000 * seed + rank, numel * _C.size_of(dtype)).copy()
    return data & 1 if dtype == _C.DType.bool else data


@cache
def sums(size: int) -> dict[int, np.ndarray]:
    """Return the sums of all sizes, which are made before the ranks begin."""
    return {
        numel: folded(FLOAT32, _C.ReduceOp.sum, [values(FLOAT32, r, numel) for r in range(size)])
        for numel in SIZES
    }


@each_value
@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, size) for kind in RUNNERS for size in RANKS if (kind, size) != ("shm", 1)],
)
def test_all_reduce_gives_the_same_bits_everywhere(kind, size):
    want = sums(size)

    def job(me):
        for seq, numel in enumerate(SIZES, 1):
            data = values(FLOAT32, me.rank, numel)
            tag = _test.OpTag("all_reduce", seq=seq, numel=numel)
            me.transport.run_shared(tag, out=address(data))
            assert np.array_equal(data, want[numel]), numel

    RUNNERS[kind](size, job)


@pytest.mark.parametrize("numel", [5, 3000, 140000])
def test_all_reduce_knows_every_dtype_and_op(numel):
    want = [folded(t, op, [values(t, r, numel) for r in range(3)]) for t, op in REDUCIBLE]

    def job(me):
        for seq, (dtype, op) in enumerate(REDUCIBLE, 1):
            data = values(dtype, me.rank, numel)
            tag = _test.OpTag("all_reduce", seq=seq, numel=numel, dtype=dtype, redop=op)
            me.transport.run_shared(tag, out=address(data))
            assert np.array_equal(data, want[seq - 1]), (dtype, op)

    RUNNERS["local"](3, job)


@each_value
@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (_test.OpTag("barrier", seq=1), "barrier #1"),
        (_test.OpTag("all_reduce", seq=1, numel=9999), "9999 float32"),
        (_test.OpTag("all_reduce", seq=1, numel=10, dtype=_C.DType.float64), "10 float64"),
        (_test.OpTag("all_reduce", seq=1, numel=10, redop=_C.ReduceOp.max), "max of 10"),
        (_test.OpTag("all_reduce", seq=2, numel=10), "all_reduce #2"),
        (_test.OpTag("all_reduce", seq=1, numel=10, label="int4"), "int4"),
    ],
)
def test_calls_that_differ_are_described_on_every_rank(theirs, words, kind):
    ours = _test.OpTag("all_reduce", seq=1, numel=10)

    def job(me):
        data = np.zeros(10**5, np.uint8)
        me.transport.run_shared(theirs if me.rank == 2 else ours, out=address(data))

    for rank, outcome in enumerate(RUNNERS[kind](3, job, errors=True)):
        assert isinstance(outcome, WireMismatch)
        assert "all_reduce #1 (sum of 10 float32)" in str(outcome)
        assert words in str(outcome)
        assert f"rank {rank} calls" in str(outcome)
        assert "rank 2 calls" in str(outcome)


@pytest.mark.parametrize("kind", RUNNERS)
def test_of_two_reasons_for_an_abort_the_first_counts(kind):
    def job(me):
        if me.rank < 2:
            time.sleep(0.05 + 0.1 * me.rank)
            me.transport.abort(f"reason {me.rank}")
            time.sleep(0.3)
        else:
            time.sleep(0.3)
            me.transport.run_shared(_test.OpTag("barrier", seq=1))

    outcomes = RUNNERS[kind](3, job, errors=True)
    assert "rank 0 aborted the group: reason 0" in str(outcomes[2])


def test_a_failed_call_ends_the_window():
    def job(me):
        if me.rank == 0:
            with pytest.raises(Timeout):
                me.transport.run_shared(_test.OpTag("barrier", seq=1), timeout=0.05)
            with pytest.raises(Error, match=r"failed in its middle \(barrier #1\)"):
                me.transport.run_shared(_test.OpTag("barrier", seq=2))
        else:
            time.sleep(0.3)

    RUNNERS["local"](2, job)
