"""The ways that a collective can take, as options of the communicator, and inputs for them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

RANKS = [1, 2, 3, 4, 7, 8]
SIZES = [0, 1, 2, 3, 5, 16, 17, 255, 1000, 4099, 100003]

WAYS = {
    "window": {"transport": "local"},
    "direct": {"transport": "local", "algo": "direct"},
    "ring": {"transport": "local", "algo": "ring"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "tcp-ring": {"transport": "tcp", "algo": "ring"},
}
# Segments of a hundred elements: many in a chunk, the last one shorter.
TINY = {"segment_bytes": 404}


def integers(rank: int, numel: int, dtype: str = "float32") -> np.ndarray:
    """Return values whose sums and products of a few are exact in every dtype that has them."""
    return _integers(rank, numel).astype(dtype)


def floats(rank: int, numel: int) -> np.ndarray:
    """Return values over many magnitudes, whose sums change with the order."""
    return _floats(rank, numel).copy()


# Each rank compares with the inputs of all ranks, so that every input is needed many times.
@lru_cache(maxsize=32)
def _integers(rank: int, numel: int) -> np.ndarray:
    return np.random.default_rng([rank, numel]).integers(0, 4, numel).astype(np.int8)


@lru_cache(maxsize=32)
def _floats(rank: int, numel: int) -> np.ndarray:
    random = np.random.default_rng([rank, numel])
    return (random.standard_normal(numel) * np.exp(4 * random.standard_normal(numel))).astype("f")


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()
