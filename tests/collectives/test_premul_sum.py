"""premul_sum: every rank's data times that rank's own factor, for all kinds of sums.

Each element gets contributions from two ranks at most, so that all sums are integers of up to
eight, which every float type holds: results are compared with ==, in any order of the sum.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from pycomm import _C
from pycomm.errors import Error
from tests.collectives.test_hierarchical import NODES
from tests.collectives.ways import CANONICAL, TINY
from tests.ranks import run, run_processes

PREMUL_SUM = _C.ReduceOp.premul_sum
FACTORS = [1.0, 3.0, 2.0, 4.0, -1.0, -2.0, -3.0, -4.0]
DTYPES = {name: getattr(torch, name.replace("e4m3", "e4m3fn")) for name in CANONICAL}
SMALL, LARGE = [0, 1, 7, 1001], [30011]
# Data are scaled before an algorithm is chosen (contribution.h), so there is one of each kind.
WAYS = {
    "window": {"transport": "local"},
    "one-shot": {"transport": "local", "algo": "one_shot"},
    "tiny-ring": {"transport": "local", "algo": "ring", **TINY},
    "tcp": {"transport": "tcp", "sockets": 1},
    "processes": {"transport": "shm"},
    "nodes": {"transport": "local", "sockets": 1, "nodes": NODES["2+1+2"]},
}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return integers as the bytes of a dtype; complex ones have the negative as their imaginary
    part (and no negative zero).

    Forked ranks have none of torch's compute threads, and would wait for them, so NumPy converts
    float32.
    """
    if dtype == "float32":
        return values.astype(np.float32).view(np.uint8)
    x = torch.from_numpy(values)
    if dtype.startswith("complex"):
        parts = torch.complex(x, 0 - x).to(DTYPES[dtype])
        return torch.view_as_real(parts).numpy().view(np.uint8).ravel()
    return x.to(DTYPES[dtype]).view(torch.uint8).numpy() if len(x) else np.zeros(0, np.uint8)


def ones(rank: int, ranks: int, numel: int) -> np.ndarray:
    i = np.arange(numel)
    return ((i % ranks == rank) | (i // ranks % ranks == rank)).astype("f8")


@functools.cache
def brought(rank: int, ranks: int, numel: int, dtype: str) -> np.ndarray:
    return stored(ones(rank, ranks, numel), dtype)


@functools.cache
def wanted(ranks: int, numel: int, dtype: str) -> np.ndarray:
    return stored(sum(FACTORS[r] * ones(r, ranks, numel) for r in range(ranks)), dtype)


def uneven(ranks: int, numel: int) -> list[int]:
    """Return sizes that add up to the whole; one of several is empty."""
    cuts = [0, *sorted((r * 7919) % (numel + 1) for r in range(1, ranks)), numel]
    return [b - a for a, b in itertools.pairwise(cuts)]


def at(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def check(c, dtype: str, numel: int, place=np.copy) -> None:
    """Check every operation that reduces, on buffers that `place(bytes)` allocates."""
    ranks, me, kind = c.size, c.rank, _C.DType.__members__[dtype]
    factor, each, root = FACTORS[me], _C.size_of(kind), numel % ranks
    mine, want = brought(me, ranks, numel, dtype), wanted(ranks, numel, dtype)

    x = place(mine)
    c.core.run("all_reduce", at(x), at(x), numel, kind, PREMUL_SUM, -1, factor)
    assert np.array_equal(x, want), ("all_reduce", dtype, numel)

    x, y = place(mine), place(np.zeros_like(mine))
    c.core.run("reduce", at(x), at(y), numel, kind, PREMUL_SUM, root, factor)
    assert np.array_equal(x, mine), ("reduce: the input is the caller's", dtype, numel)
    assert np.array_equal(y, want if me == root else np.zeros_like(mine)), ("reduce", dtype, numel)
    c.core.run("reduce", at(x), at(x), numel, kind, PREMUL_SUM, root, factor)
    assert np.array_equal(x, want if me == root else mine), ("reduce in place", dtype, numel)

    wide, all_want = brought(me, ranks, ranks * numel, dtype), wanted(ranks, ranks * numel, dtype)
    own = slice(me * numel * each, (me + 1) * numel * each)
    x, y = place(wide), place(np.zeros_like(mine))
    c.core.run("reduce_scatter", at(x), at(y), numel, kind, PREMUL_SUM, -1, factor)
    assert np.array_equal(x, wide), ("reduce_scatter: the input is the caller's", dtype, numel)
    assert np.array_equal(y, all_want[own]), ("reduce_scatter", dtype, numel)
    c.core.run("reduce_scatter", at(x), at(x) + own.start, numel, kind, PREMUL_SUM, -1, factor)
    assert np.array_equal(x[own], all_want[own]), ("reduce_scatter in place", dtype, numel)

    numels = uneven(ranks, numel)
    begins = [sum(numels[:r]) for r in range(ranks + 1)]
    x, y = place(mine), place(np.zeros(numels[me] * each, np.uint8))
    parts = _C.Parts([(at(x) + begins[r] * each, numels[r]) for r in range(ranks)])
    c.core.run("reduce_scatter", parts, at(y), 0, kind, PREMUL_SUM, -1, factor)
    assert np.array_equal(x, mine), ("uneven reduce_scatter: the input", dtype, numel)
    part = want[begins[me] * each : begins[me + 1] * each]
    assert np.array_equal(y, part), ("uneven reduce_scatter", dtype, numel)


def check_all(dtypes: list[str]):
    def job(c) -> None:
        for dtype in dtypes:
            for numel in SMALL:
                check(c, dtype, numel)
        for numel in LARGE:
            check(c, "float32", numel)

    return job


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_scales_its_own_data(way):
    ranks = 5 if way == "nodes" else 3
    if way == "processes":  # forked ranks have none of torch's compute threads
        run_processes(ranks, lambda c: check(c, "float32", 200_003), **WAYS[way])
    else:
        run(ranks, check_all([*DTYPES]), **WAYS[way])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("who", ["all", "some"])
def test_on_memory_that_all_ranks_share(ranks, who):
    """Peers read this rank's data in place, and write their results there."""

    def job(c):
        def place(values):
            if who == "some" and c.rank != 1:
                return values.copy()
            array = np.asarray(c.allocate(len(values), "uint8"))
            array[:] = values
            return array

        for dtype in ("float32", "bfloat16"):
            for numel in (3, 1024, 4099, 70001):
                check(c, dtype, numel, place)

    run(ranks, job, transport="local")


def test_what_travels_is_rounded_once():
    """The product is rounded to the dtype before it is sent, and the sum at its end."""

    def job(c):
        x = np.full(40, [1.0, 513.0][c.rank], np.float16)
        c.all_reduce(x, "premul_sum", factor=[1.0, 1.0 / 3][c.rank])
        return x

    product = np.float16(np.float32(513.0) * np.float32(1.0 / 3))
    want = np.float16(np.float32(1.0) + np.float32(product))
    for options in ({"transport": "local"}, {"transport": "tcp", "sockets": 1}):
        for result in run(2, job, **options):
            assert np.array_equal(result, np.full(40, want))


def test_integers_have_no_premul_sum():
    x = np.ones(3, np.int32)
    with pytest.raises(Error, match="premul_sum has no meaning for int32"):
        _C.scale(_C.DType.int32, x.ctypes.data, x.ctypes.data, 3, 2.0)
