"""Chunks, segments and runs: they cover, do not overlap, are balanced and cut at allowed places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm._C import schedule

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
