"""Collectives over shared memory: the right bits on every rank, for any size and order of calls."""

from __future__ import annotations

import os
import signal
import time
from functools import cache

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import Error, PeerLost, Timeout, WireMismatch
from tests.extent import each_value, part
from tests.ranks import good
from tests.transports.transport_ranks import RUNNERS, address, processes, sample, threads

RANKS = [1, 2, 3, 4, 7, 8]
FLOAT32 = _C.DType.float32
# Around the borders of the flag's lines (120 B), one slot (128 KiB) and more of them than the four
# that a rank has.
SIZES = [0, 1, 2, 7, 29, 30, 31, 100, 2047, 2049, 32768, 32769, 70001, 170000]


def values(dtype: _C.DType, rank: int, numel: int, seed: int = 0) -> np.ndarray:
    data = sample(1000 * seed + rank, numel * _C.size_of(dtype))
    return data & 1 if dtype == _C.DType.bool else data


@cache
def sums(size: int) -> dict[int, np.ndarray]:
    """Return the sums of all sizes, which are made before the ranks begin."""
    return {
        numel: folded(FLOAT32, _C.ReduceOp.sum, [values(FLOAT32, r, numel) for r in range(size)])
        for numel in SIZES
    }


def folded(dtype: _C.DType, op: _C.ReduceOp, inputs: list[np.ndarray]) -> np.ndarray:
    """Reduce the inputs in rank order, by the core's one-process reduction."""
    out = np.empty_like(inputs[0])
    numel = out.nbytes // _C.size_of(dtype)
    pointers = [address(x) for x in inputs]
    _C.reduce(dtype, op, pointers, address(out), numel)
    return out


def meaningful() -> list[tuple[_C.DType, _C.ReduceOp]]:
    pairs = []
    for dtype in _C.DType.__members__.values():
        for op in _C.ReduceOp.__members__.values():
            try:
                _C.check_reducible(dtype, op)
            except Error:
                continue
            pairs.append((dtype, op))
    return pairs


@each_value
@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, size) for kind in RUNNERS for size in RANKS if (kind, size) != ("shm", 1)],
)
def test_all_reduce_gives_the_same_bits_everywhere(kind, size):
    want = sums(size)

    def job(transport, rank):
        for seq, numel in enumerate(SIZES, 1):
            data = values(FLOAT32, rank, numel)
            tag = _C.OpTag("all_reduce", seq=seq, numel=numel)
            transport.run_shared(tag, out=address(data))
            assert np.array_equal(data, want[numel]), numel

    good(RUNNERS[kind](size, job))


@pytest.mark.parametrize("numel", [5, 3000, 140000])
def test_all_reduce_knows_every_dtype_and_op(numel):
    want = [folded(t, op, [values(t, r, numel) for r in range(3)]) for t, op in meaningful()]

    def job(transport, rank):
        for seq, (dtype, op) in enumerate(meaningful(), 1):
            data = values(dtype, rank, numel)
            tag = _C.OpTag("all_reduce", seq=seq, numel=numel, dtype=dtype, redop=op)
            transport.run_shared(tag, out=address(data))
            assert np.array_equal(data, want[seq - 1]), (dtype, op)

    good(threads(3, job))


@pytest.mark.parametrize("size", RANKS)
def test_reduce_scatter_gives_each_rank_its_part(size):
    numels = [0, 1, 5, 20, 1000, 40001]
    wants = [
        folded(FLOAT32, _C.ReduceOp.sum, [values(FLOAT32, r, size * n) for r in range(size)])
        for n in numels
    ]

    def job(transport, rank):
        for seq, (numel, want) in enumerate(zip(numels, wants, strict=True), 1):
            for in_place in (False, True):
                data = values(FLOAT32, rank, size * numel)
                own = data[rank * numel * 4 : (rank + 1) * numel * 4]
                out = own if in_place else np.zeros(numel * 4, np.uint8)
                tag = _C.OpTag("reduce_scatter", seq=2 * seq + in_place, numel=numel)
                transport.run_shared(tag, address(data), address(out))
                assert np.array_equal(out, want[rank * numel * 4 : (rank + 1) * numel * 4])

    good(threads(size, job))


@pytest.mark.parametrize("size", RANKS)
def test_all_gather_brings_all_parts(size):
    numels = [0, 1, 5, 20, 1000, 40001, 170000]
    wants = [np.concatenate([values(FLOAT32, r, n) for r in range(size)]) for n in numels]

    def job(transport, rank):
        for seq, (numel, want) in enumerate(zip(numels, wants, strict=True), 1):
            for in_place in (False, True):
                out = np.zeros(size * numel * 4, np.uint8)
                data = out[rank * numel * 4 : (rank + 1) * numel * 4] if in_place else None
                data = values(FLOAT32, rank, numel) if data is None else data
                data[:] = values(FLOAT32, rank, numel)
                tag = _C.OpTag("all_gather", seq=2 * seq + in_place, numel=numel)
                transport.run_shared(tag, address(data), address(out))
                assert np.array_equal(out, want)

    good(threads(size, job))


@pytest.mark.parametrize("size", RANKS)
def test_broadcast_copies_the_root(size):
    def job(transport, rank):
        seq = 0
        for numel in [0, 1, 1000, 170000]:
            for root in range(size):
                seq += 1
                data = values(FLOAT32, rank, numel)
                tag = _C.OpTag("broadcast", seq=seq, numel=numel, root=root)
                transport.run_shared(tag, out=address(data))
                assert np.array_equal(data, values(FLOAT32, root, numel))

    good(threads(size, job))


@pytest.mark.parametrize(
    ("size", "kind"),
    [(size, kind) for place, size in enumerate([2, 3, 8]) for kind in part([*RUNNERS], 2, place)],
)
def test_calls_of_all_kinds_may_follow_each_other(size, kind):
    """Slots are reused across calls of different layouts while slow ranks still read."""
    plan = np.random.default_rng(size)
    steps = [
        (["all_reduce", "all_gather", "broadcast", "barrier"][plan.integers(4)], int(n), int(pause))
        for n, pause in zip(
            2 ** plan.uniform(0, 17, 150), plan.integers(0, 4 * size, 150), strict=True
        )
    ]

    def result(seq, op, inputs):
        if op == "all_reduce":
            return folded(FLOAT32, _C.ReduceOp.sum, inputs)
        return {"all_gather": np.concatenate(inputs), "broadcast": inputs[seq % size]}.get(op)

    wants = [
        result(seq, op, [values(FLOAT32, r, numel, seq) for r in range(size)])
        for seq, (op, numel, _) in enumerate(steps, 1)
    ]

    def job(transport, rank):
        for seq, (op, numel, slow_rank) in enumerate(steps, 1):
            if slow_rank == rank:
                time.sleep(0.001)
            data = values(FLOAT32, rank, numel, seq)
            before = data.copy()
            root = seq % size if op == "broadcast" else -1
            tag = _C.OpTag(op, seq=seq, numel=numel, root=root)
            out = np.zeros(size * numel * 4, np.uint8) if op == "all_gather" else data
            transport.run_shared(tag, address(data), address(out))
            want = before if op == "barrier" else wants[seq - 1]
            assert np.array_equal(out, want), (seq, op, numel)

    good(RUNNERS[kind](size, job))


@each_value
@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (_C.OpTag("barrier", seq=1), "barrier #1"),
        (_C.OpTag("all_reduce", seq=1, numel=9999), "9999 float32"),
        (_C.OpTag("all_reduce", seq=1, numel=10, dtype=_C.DType.float64), "10 float64"),
        (_C.OpTag("all_reduce", seq=1, numel=10, redop=_C.ReduceOp.max), "max of 10"),
        (_C.OpTag("all_reduce", seq=2, numel=10), "all_reduce #2"),
        (_C.OpTag("all_reduce", seq=1, numel=10, label="int4"), "int4"),
    ],
)
def test_calls_that_differ_are_described_on_every_rank(theirs, words, kind):
    ours = _C.OpTag("all_reduce", seq=1, numel=10)

    def job(transport, rank):
        data = np.zeros(10**5, np.uint8)
        transport.run_shared(theirs if rank == 2 else ours, out=address(data))

    for rank, outcome in enumerate(RUNNERS[kind](3, job)):
        assert isinstance(outcome, WireMismatch)
        assert "all_reduce #1 (sum of 10 float32)" in str(outcome)
        assert words in str(outcome)
        assert f"rank {rank} calls" in str(outcome)
        assert "rank 2 calls" in str(outcome)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_rank_that_does_not_come_is_named(kind):
    def job(transport, rank):
        transport.run_shared(_C.OpTag("barrier", seq=1))
        data = np.zeros(4000, np.uint8)
        if rank == 1:
            time.sleep(1.0)
        else:
            transport.run_shared(
                _C.OpTag("all_reduce", seq=2, numel=1000), out=address(data), timeout=0.3
            )

    outcomes = RUNNERS[kind](3, job)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], Timeout)
        assert outcomes[rank].args[0] == (
            f"rank {rank}: all_reduce #2 (sum of 1000 float32) "
            "did not end within the timeout of 300 ms"
        )


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_rank_that_leaves_is_named_at_once(kind):
    def job(transport, rank):
        transport.run_shared(_C.OpTag("barrier", seq=1))
        start = time.monotonic()
        if rank != 1:
            try:
                transport.run_shared(_C.OpTag("barrier", seq=2))
            except PeerLost as lost:
                return lost.rank, time.monotonic() - start
        return None

    outcomes = RUNNERS[kind](3, job)
    for rank in (0, 2):
        lost, seconds = outcomes[rank]
        assert lost == 1
        assert seconds < 0.5


def test_a_rank_that_dies_is_named_in_a_fifth_of_a_second():
    def job(transport, rank):
        transport.run_shared(_C.OpTag("barrier", seq=1))
        start = time.monotonic()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            transport.run_shared(_C.OpTag("barrier", seq=2))
        except PeerLost as lost:
            seconds = time.monotonic() - start
            time.sleep(0.3)  # all ranks detect the death by themselves
            return lost.rank, seconds, str(lost)

    outcomes = processes(3, job)
    assert outcomes[1] is None
    for rank in (0, 2):
        lost, seconds, text = outcomes[rank]
        assert lost == 1
        assert "rank 1 died" in text
        assert seconds < 0.2


@pytest.mark.parametrize("kind", RUNNERS)
def test_an_abort_reaches_all_that_wait(kind):
    def job(transport, rank):
        if rank == 0:
            time.sleep(0.05)
            transport.abort("the disk is full")
            time.sleep(0.3)
        else:
            transport.run_shared(_C.OpTag("barrier", seq=1))

    outcomes = RUNNERS[kind](3, job)
    for rank in (1, 2):
        assert type(outcomes[rank]) is Error
        assert "rank 0 aborted the group: the disk is full" in str(outcomes[rank])


@pytest.mark.parametrize("kind", RUNNERS)
def test_of_two_reasons_for_an_abort_the_first_counts(kind):
    def job(transport, rank):
        if rank < 2:
            time.sleep(0.05 + 0.1 * rank)
            transport.abort(f"reason {rank}")
            time.sleep(0.3)
        else:
            time.sleep(0.3)
            transport.run_shared(_C.OpTag("barrier", seq=1))

    outcomes = RUNNERS[kind](3, job)
    assert "rank 0 aborted the group: reason 0" in str(outcomes[2])


def test_a_failed_call_ends_the_window():
    def job(transport, rank):
        if rank == 0:
            with pytest.raises(Timeout):
                transport.run_shared(_C.OpTag("barrier", seq=1), timeout=0.05)
            with pytest.raises(Error, match=r"failed in its middle \(barrier #1\)"):
                transport.run_shared(_C.OpTag("barrier", seq=2))
        else:
            time.sleep(0.3)

    good(threads(2, job))
