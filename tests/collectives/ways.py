"""The ways that a collective can take, as options of the communicator, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import numpy as np

from pycomm import _C, _test

T = TypeVar("T")

RANKS = [1, 2, 3, 4, 7, 8]
SIZES = [0, 1, 2, 3, 5, 16, 17, 255, 1000, 4099, 100003]

WAYS = {
    "window": {"transport": "local"},
    "direct": {"transport": "local", "algo": "direct"},
    "ring": {"transport": "local", "algo": "ring"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "tcp-ring": {"transport": "tcp", "algo": "ring"},
}
# The algorithms of each collective; the others choose `auto`.
ALGOS_OF = {
    "all_reduce": ["one_shot", "two_shot", "bruck", "ring"],
    "reduce_scatter": ["one_shot", "ring"],
    "all_gather": ["one_shot", "bruck", "ring"],
    "broadcast": ["one_shot", "two_shot", "tree"],
    "reduce": ["one_shot", "two_shot", "tree"],
    "barrier": ["one_shot", "bruck"],
}
# Segments of a hundred elements: many in a chunk, the last one shorter.
TINY = {"segment_bytes": 404}


def _reducible(dtype: _C.DType, op: _C.ReduceOp) -> bool:
    try:
        _test.check_reducible(dtype, op)
    except RuntimeError:
        return False
    return True


REDUCIBLE = [
    (dtype, op)
    for dtype in _C.DType.__members__.values()
    for op in _C.ReduceOp.__members__.values()
    if _reducible(dtype, op)
]


def folded(dtype: _C.DType, op: _C.ReduceOp, inputs: list[np.ndarray]) -> np.ndarray:
    """Reduce in rank order, by the core in one process: the bits that every way must give."""
    out = np.empty_like(inputs[0])
    numel = out.nbytes // _C.size_of(dtype)
    _C.reduce(dtype, op, [x.ctypes.data for x in inputs], out.ctypes.data, numel)
    return out


def integers(rank: int, numel: int, dtype: str = "float32") -> np.ndarray:
    """Return values whose sums and products of a few are exact in every dtype that has them."""
    return kept(_integers, _many_integers, rank, numel).astype(dtype)


def floats(rank: int, numel: int) -> np.ndarray:
    """Return values over many magnitudes, whose sums change with the order."""
    return kept(_floats, _many_floats, rank, numel).copy()


def kept(few: Callable[..., T], many: Callable[..., T], rank: int, numel: int) -> T:
    """Return an input out of its cache. Each rank compares with the inputs of all ranks, in many
    tests; of large ones few are kept, since every fork of this process takes their pages along."""
    return (few if numel < 100_000 else many)(rank, numel)


def _new_integers(rank: int, numel: int) -> np.ndarray:
    return np.random.default_rng([rank, numel]).integers(0, 4, numel).astype(np.int8)


def _new_floats(rank: int, numel: int) -> np.ndarray:
    random = np.random.default_rng([rank, numel])
    return (random.standard_normal(numel) * np.exp(4 * random.standard_normal(numel))).astype("f")


_integers, _many_integers = (lru_cache(maxsize=most)(_new_integers) for most in (512, 32))
_floats, _many_floats = (lru_cache(maxsize=most)(_new_floats) for most in (256, 32))


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()
