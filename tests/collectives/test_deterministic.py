"""Determinism: the bits of a sum depend only on its inputs and the number of ranks."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from pycomm import _C
from tests.collectives.ways import floats
from tests.extent import each_value
from tests.ranks import run

NUMEL = 60_000  # two-shot over channels, several slots of the window
PREFIXES = [1, 29, 31, 1000, 8191, 33_000]  # within a flag's line, one-shot, one slot, two-shot
# All ways whose sums are in rank order; automatic choice is restricted to these.
WAYS = {
    "window": {"transport": "local"},
    "one-shot": {"transport": "local", "algo": "one_shot"},
    "two-shot": {"transport": "local", "algo": "two_shot"},
    "small segments": {"transport": "local", "algo": "two_shot", "segment_bytes": 4096},
    "bruck": {"transport": "local", "algo": "bruck"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "tcp, several sockets": {"transport": "tcp", "sockets": 3, "algo": "direct"},
}

ways = pytest.mark.parametrize("way", WAYS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
all_ranks = pytest.mark.parametrize("ranks", [2, 3, 4])


class Values:
    """Values of many magnitudes, as raw bytes: another order of a sum changes the result."""

    def __init__(self, dtype, rank, numel):
        wide = floats(rank, numel).view(np.uint32)
        self.dtype = getattr(_C.DType, dtype)
        # The upper half of a float32 is a bfloat16.
        self.array = wide if dtype == "float32" else (wide >> 16).astype(np.uint16)

    def part(self, begin, end):
        result = Values.__new__(Values)
        result.dtype, result.array = self.dtype, self.array[begin:end].copy()
        return result

    @property
    def bytes(self):
        return self.array.tobytes()


def all_reduce(c, values, op=_C.ReduceOp.sum):
    c.core.all_reduce(values.array.ctypes.data, values.array.size, values.dtype, op)
    return values


def reduce_scatter(c, values):
    out = values.part(0, values.array.size // c.size)
    c.core.reduce_scatter(
        values.array.ctypes.data,
        out.array.ctypes.data,
        out.array.size,
        values.dtype,
        _C.ReduceOp.sum,
    )
    return out


def in_rank_order(dtype, ranks, numel=NUMEL):
    """Return the core's sums in one process, which every way must reproduce."""
    inputs = [Values(dtype, rank, numel) for rank in range(ranks)]
    out = inputs[0].part(0, numel)
    pointers = [values.array.ctypes.data for values in inputs]
    _C.reduce(out.dtype, _C.ReduceOp.sum, pointers, out.array.ctypes.data, numel)
    return out


@each_value
@ways
@dtypes
@all_ranks
def test_a_part_of_a_message_has_the_bits_that_it_has_alone(way, dtype, ranks):
    want = in_rank_order(dtype, ranks)

    def job(c):
        mine = Values(dtype, c.rank, NUMEL)
        whole = all_reduce(c, mine.part(0, NUMEL))
        prefixes = [all_reduce(c, mine.part(0, numel)) for numel in PREFIXES]
        # Buckets have uneven sizes, with one's last element right before the next one's first.
        edges = [0, 7, 1000, 1001, 20_000, 52_345, NUMEL]
        buckets = [all_reduce(c, mine.part(*edge)) for edge in itertools.pairwise(edges)]
        return whole, prefixes, buckets

    for whole, prefixes, buckets in run(ranks, job, **WAYS[way]):
        assert whole.bytes == want.bytes
        for numel, prefix in zip(PREFIXES, prefixes, strict=True):
            assert prefix.bytes == want.part(0, numel).bytes, numel
        assert b"".join(bucket.bytes for bucket in buckets) == want.bytes


@each_value
@ways
@dtypes
@all_ranks
def test_reduce_scatter_has_the_bits_of_all_reduce(way, dtype, ranks):
    numel = NUMEL // ranks * ranks
    want = in_rank_order(dtype, ranks, numel)

    def job(c):
        return reduce_scatter(c, Values(dtype, c.rank, numel))

    each = numel // ranks
    for rank, out in enumerate(run(ranks, job, **WAYS[way])):
        assert out.bytes == want.part(rank * each, (rank + 1) * each).bytes


@each_value
@ways
@dtypes
def test_arrival_does_not_matter(way, dtype):
    """Another rank comes first in each run, and during a run ranks are delayed."""
    ranks = 3
    want = in_rank_order(dtype, ranks)

    def job(c):
        results = []
        for turn in range(6):
            time.sleep(0.003 * ((c.rank + turn) % ranks))
            results.append(all_reduce(c, Values(dtype, c.rank, NUMEL)).bytes)
        return results

    for results in run(ranks, job, **WAYS[way]):
        assert results == [want.bytes] * 6
