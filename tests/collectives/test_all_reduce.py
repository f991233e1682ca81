"""all_reduce over every way there is: exact on integers, the same bits on all ranks, always."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import run

SIZES = [0, 1, 2, 3, 5, 16, 17, 255, 1000, 4099, 100003]
RANKS = [1, 2, 3, 4, 7, 8]
# Name: what makes the communicator take that way.
WAYS = {
    "window": {"transport": "local"},
    "direct": {"transport": "local", "algo": "direct"},
    "ring": {"transport": "local", "algo": "ring"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "tcp-ring": {"transport": "tcp", "algo": "ring"},
}
ways = pytest.mark.parametrize("way", WAYS)


def integers(rank: int, numel: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([rank, numel]).integers(0, 100, numel).astype(dtype)


@ways
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_of_integers_are_exact(way, ranks):
    def job(c):
        results = []
        for numel in SIZES:
            x = integers(c.rank, numel)
            c.all_reduce(x)
            results.append(x)
        return results

    for results in run(ranks, job, **WAYS[way]):
        for numel, result in zip(SIZES, results, strict=True):
            want = sum(integers(r, numel) for r in range(ranks))
            assert np.array_equal(result, want), numel
