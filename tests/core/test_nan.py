"""A reduction that gives NaN gives the same NaN, whatever processor or place made it; for those of
ranks test_algorithms.py tests the same."""

from __future__ import annotations

import numpy as np
import pytest

from pycomm import _C
from tests.collectives.device import ranks as device_ranks
from tests.collectives.ways import CANONICAL, folded
from tests.extent import each_value

DTYPES = _C.DType.__members__
OPS = _C.ReduceOp.__members__
everywhere = pytest.mark.parametrize("dtype", CANONICAL)


def special(rank: int, dtype: str, numel: int) -> np.ndarray:
    """Any bits, half of them with the exponent of Inf and NaN: all signs and payloads."""
    word, _, inf = CANONICAL[dtype]
    parts = numel * (2 if dtype.startswith("complex") else 1)
    random = np.random.default_rng([rank, numel])
    x = random.integers(0, np.iinfo(word).max, parts, dtype=word, endpoint=True)
    x[::2] |= np.array(inf, word)
    x[1::8] = inf  # Inf, whose sums with -Inf are new NaNs
    return x


def nans(x: np.ndarray, dtype: str) -> np.ndarray:
    word, canonical, inf = CANONICAL[dtype]
    sign = 1 << (8 * np.dtype(word).itemsize - 1)
    magnitude = x & np.array(~sign & np.iinfo(word).max, word)
    return magnitude == canonical if dtype == "float8_e4m3" else magnitude > inf


def ops(dtype: str) -> list[str]:
    if dtype.startswith("complex"):
        return ["sum", "avg", "prod", "premul_sum"]
    return ["sum", "avg", "prod", "min", "max", "premul_sum"]


def check(x: np.ndarray, dtype: str, what: object) -> None:
    word, canonical, _ = CANONICAL[dtype]
    found = nans(x, dtype)
    assert found.any(), what
    assert np.array_equal(x[found], np.full(found.sum(), canonical, word)), what


@each_value
@everywhere
@pytest.mark.parametrize("numel", [1, 3, 7, 8, 9, 1027])
def test_of_reductions(dtype, numel):
    """At sizes around the vectors, so that vectors and what is left over are compared."""
    kind = DTYPES[dtype]
    for op in ops(dtype):
        for count in (2, 3, 5):
            # Whatever the sums are, the first input makes them NaN.
            inputs = [special(r, dtype, numel) for r in range(count)]
            word, canonical, _ = CANONICAL[dtype]
            sign = 1 << (8 * np.dtype(word).itemsize - 1)
            inputs[count // 2][:] = np.array(canonical | sign | (1 if numel % 2 else 0), word)
            if op == "premul_sum":
                for x in inputs:
                    _C.scale(kind, x.ctypes.data, x.ctypes.data, numel, -0.5)
                    if nans(x, dtype).any():
                        check(x, dtype, "scale")
            out = folded(kind, OPS[op], inputs)
            assert nans(out, dtype).all(), (op, count)
            check(out, dtype, (op, count))


@each_value
@everywhere
@pytest.mark.parametrize("algo", ["one_shot", "two_shot"])
def test_of_kernels_of_devices(dtype, algo):
    kind, numel = DTYPES[dtype], 1027

    def job(c):
        for op in ops(dtype):
            x = c.put(special(c.rank, dtype, numel))
            c.call("all_reduce", x.address, x.address, numel, kind, OPS[op], algo=algo)
            check(x.get(), dtype, op)

    device_ranks.run(3, job)


def test_of_conversions_to_and_from_float16():
    """Eight at a time by an instruction, the rest by plain arithmetic: with the same bits."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    words = np.array([0x7FC00000, 0x7F800001, 0x7FA12345, 0x7FFFFFFF, 0x7F802000], np.uint32)
    words = np.concatenate((words, words | 0x80000000))
    options = {"by": (0, 1.0), "clip": (0, 1.0), "divisor": 1.0, "found_inf": 0}

    def converted(x, source, target, out):
        _C.convert(
            x.ctypes.data, DTYPES[source], out.ctypes.data, DTYPES[target], len(x), **options
        )
        return out

    wide = converted(codes, "float16", "float32", np.zeros(len(codes), np.uint32))
    for i in [*range(0x7BFA, 0x8000), *range(0xFBFA, 1 << 16, 7)]:
        alone = converted(codes[i : i + 1].copy(), "float16", "float32", np.zeros(1, np.uint32))
        assert alone[0] == wide[i], hex(i)
    for word in words:  # quiet, with its sign and what fits of its payload
        narrow = converted(np.full(9, word), "float32", "float16", np.zeros(9, np.uint16))
        assert set(narrow.tolist()) == {0x7E00 | int(word) >> 31 << 15 | int(word) >> 13 & 0x3FF}, (
            hex(word)
        )
