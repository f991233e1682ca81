"""Sparse and lossless codecs in the coded all-reduce: what travels and what is owed, end to end."""

from __future__ import annotations

import numpy as np
import pytest

import pycomm
from pycomm.communicator import Piece
from tests.extent import each_value
from tests.ranks import run

NUMEL = [10_000, 1, 77_000, 300]


def gradient(rank: int, tensor: int) -> np.ndarray:
    """Return small integers, whose sums are exact in any order."""
    random = np.random.default_rng([rank, tensor])
    return random.integers(-1000, 1000, NUMEL[tensor]).astype(np.float32)


def reduce(ranks: int, spec: str) -> list[tuple[list, list]]:
    """Return each rank's results and residuals, by tensor."""
    codec = pycomm.codec(spec)

    def rank_main(c):
        residuals = [np.zeros(n, np.float32) for n in NUMEL]
        pieces = [
            Piece(n, codec, tensor=t, residual=r)
            for t, (n, r) in enumerate(zip(NUMEL, residuals, strict=True))
        ]
        data = np.concatenate([gradient(c.rank, t) for t in range(len(NUMEL))])
        assert c.all_reduce_coded(data, pieces, average=False)
        return np.split(data, np.cumsum(NUMEL)[:-1]), residuals

    return run(ranks, rank_main)


@each_value
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "spec",
    [
        "topk:0.01",
        "topk:0.05,indices=int12",
        "lossless",
    ],
)
def test_what_travels_and_what_is_owed_is_all_there_was(spec, ranks):
    done = reduce(ranks, spec)
    for tensor in range(len(NUMEL)):
        for result, _ in done:
            assert result[tensor].tobytes() == done[0][0][tensor].tobytes()
        truth = sum(gradient(rank, tensor) for rank in range(ranks))
        owed = sum(residuals[tensor] for _, residuals in done)
        assert np.array_equal(done[0][0][tensor] + owed, truth)
