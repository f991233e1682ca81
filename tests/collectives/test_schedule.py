"""Chunks, segments and runs: they cover, do not overlap, are balanced and cut at allowed places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import _C, _test
from pycomm._test import schedule
from pycomm.errors import Error
from tests.collectives.ways import ALGOS_OF
from tests.extent import each_value
from tests.ranks import run

RANKS = st.integers(1, 9)


@given(st.integers(0, 5000), RANKS, st.integers(1, 64))
def test_chunks_cover_and_are_balanced(numel, ranks, granule):
    chunks = [schedule.chunk(numel, ranks, r, granule) for r in range(ranks)]
    assert [0, *(end for _, end in chunks)] == [*(begin for begin, _ in chunks), numel]
    assert all(begin % granule == 0 or begin == numel for begin, _ in chunks)
    granules = [-(-(end - begin) // granule) for begin, end in chunks]
    assert max(granules) - min(granules) <= 1


@given(st.integers(0, 1000), st.integers(0, 3000), st.integers(1, 700))
def test_segments_cover_their_chunk(begin, numel, segment):
    segments = schedule.segments((begin, begin + numel), segment)
    covered = [i for b, e in segments for i in range(b, e)]
    assert covered == list(range(begin, begin + numel))
    assert all(0 < e - b <= segment for b, e in segments)
    assert all(e - b == segment for b, e in segments[:-1])


PARTS = st.lists(st.tuples(st.integers(0, 900), st.sampled_from([1, 32, 128, 256])), max_size=8)


@given(PARTS, RANKS, st.integers(1, 600))
def test_runs_cover_every_part_and_are_cut_at_its_granules(parts, ranks, segment):
    seen = [0] * len(parts)
    last = -1
    for runs in (runs for chunk in schedule.bucket_runs(parts, ranks, segment) for runs in chunk):
        assert runs, "no segment is empty"
        for part, offset, numel in runs:
            assert part >= last, "runs ascend"
            last = part
            assert offset == seen[part], "runs of a part follow each other"
            assert offset % parts[part][1] == 0
            assert numel > 0
            seen[part] += numel
    assert seen == [numel for numel, _ in parts]


@given(PARTS, RANKS)
def test_chunks_of_a_bucket_are_balanced_to_a_granule(parts, ranks):
    total = sum(numel for numel, _ in parts)
    largest = max((granule for _, granule in parts), default=1)
    for chunk in schedule.bucket_runs(parts, ranks, 1 << 20):
        numel = sum(run[2] for runs in chunk for run in runs)
        assert abs(numel - total / ranks) <= largest


@pytest.mark.parametrize("segment", [1, 100, 128, 5000])
def test_a_segment_is_about_as_large_as_asked(segment):
    (chunk,) = schedule.bucket_runs([(1000, 128), (3000, 128)], 1, segment)
    sizes = [sum(run[2] for run in runs) for runs in chunk]
    assert max(sizes) <= max(segment + 127, 128)


# ----------------------------------------------------------------------------------------- choice
# The cheapest algorithm that keeps the order of sums, by verified costs.


OTHER_ORDERS = {"ring"}
GROUPS = [2, 3, 4, 5, 7, 8, 13, 16, 32, 64, 257]
SIZES = [0, 8, 1000, 10_000, 100_000, 10**6, 10**8]
FLOATS = _C.DType.float32, _C.DType.bfloat16, _C.DType.complex64

ops = pytest.mark.parametrize("op", ALGOS_OF)


def tag(op, dtype=_C.DType.float32, redop=_C.ReduceOp.sum):
    return _test.OpTag(op, dtype=dtype, redop=redop)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "reduce"])
def test_floats_are_never_summed_in_another_order(op):
    for dtype in FLOATS:
        for redop in (_C.ReduceOp.sum, _C.ReduceOp.avg, _C.ReduceOp.min, _C.ReduceOp.prod):
            for ranks in GROUPS:
                for size in SIZES:
                    chosen = _test.schedule.select(tag(op, dtype, redop), ranks, size)
                    assert chosen not in OTHER_ORDERS


@ops
def test_the_cheapest_one_is_chosen(op):
    for dtype in (_C.DType.float32, _C.DType.int64):
        call = tag(op, dtype)
        reduces = op in ("all_reduce", "reduce_scatter", "reduce")
        fixed = reduces and dtype == _C.DType.float32
        allowed = [a for a in ALGOS_OF[op] if not (fixed and a in OTHER_ORDERS)]
        for ranks in GROUPS:
            for size in SIZES:
                seconds = {a: _test.schedule.cost(call, ranks, size, a)[-1] for a in allowed}
                chosen = _test.schedule.select(call, ranks, size)
                assert seconds[chosen] == min(seconds.values())


def test_bytes_that_are_summed_take_time():
    """A reduce-scatter is an all-gather that also sums what arrives."""
    sums, moves = (
        _test.schedule.cost(tag(op), 4, 10**6, "one_shot")
        for op in ("reduce_scatter", "all_gather")
    )
    assert sums[:3] == moves[:3]
    assert (sums[3], moves[3]) == (10**6, 0)
    assert sums[-1] > moves[-1]


@ops
def test_a_named_algorithm_is_used_where_it_exists(op):
    for wanted in _C.ALGOS[1:]:
        for size in SIZES:
            chosen = _test.schedule.select(tag(op), 8, size, wanted)
            if wanted in ALGOS_OF[op]:
                assert chosen == wanted
            elif wanted == "direct":
                assert chosen in ("one_shot", "two_shot")
            else:
                assert chosen == _test.schedule.select(tag(op), 8, size)


def test_an_operation_without_the_algorithm_says_so():
    with pytest.raises(Error, match="barrier has no algorithm ring"):
        _test.schedule.cost(tag("barrier"), 4, 0, "ring")
    with pytest.raises(Error, match='unknown algo "rings"; use one of auto'):
        _test.schedule.select(tag("barrier"), 4, 0, "rings")


@each_value
@pytest.mark.parametrize("ranks", [2, 4, 5, 8])
@pytest.mark.parametrize(("op", "algo"), [(op, a) for op, algos in ALGOS_OF.items() for a in algos])
def test_the_table_knows_the_bytes(op, algo, ranks):
    numel = 1680 * 16 * 8  # parts of 1 to 8 ranks are whole cache lines
    root = 0

    def job(c):
        c.barrier()
        before = c.sent_bytes()
        x = np.ones(numel, np.float32)
        part = np.ones(numel // c.size, np.float32)
        if op == "all_reduce":
            c.all_reduce(x)
        elif op == "reduce_scatter":
            c.reduce_scatter(x[: len(part) * c.size], part)
        elif op == "all_gather":
            c.all_gather(part, x[: len(part) * c.size])
        elif op == "broadcast":
            c.broadcast(x, root)
        elif op == "reduce":
            c.reduce(x, x.copy(), root)
        else:
            c.barrier()
        return c.sent_bytes() - before

    sent = run(ranks, job, transport="local", algo=algo)
    _, messages, expected, *_ = _test.schedule.cost(tag(op), ranks, 4 * numel, algo)
    if op in ("reduce", "all_gather", "reduce_scatter") or ranks & (ranks - 1):
        # Some rank receives what the table says, and all that is received has been sent. The table
        # assumes equal shares: a rank that acts for two may send one part more.
        part = 4 * numel / ranks if ranks & (ranks - 1) else 0
        assert max(sent) <= expected * 1.01 + 128 * messages + part
        assert sum(sent) >= expected
    else:
        assert max(sent) == pytest.approx(expected, rel=0.01, abs=128 * max(1, messages))
