"""Sparse and lossless codecs in the coded all-reduce: the promises of their combine, end to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs import RandomKey
from pycomm.communicator import Piece
from tests.extent import each_value
from tests.ranks import run

NUMEL = [10_000, 1, 77_000, 300]
SEED, STEP = 42, 3
SHARED = -2  # the hop whose seed all ranks share


def gradient(rank: int, tensor: int) -> np.ndarray:
    """Return small integers, whose sums are exact in any order."""
    random = np.random.default_rng([rank, tensor])
    return random.integers(-1000, 1000, NUMEL[tensor]).astype(np.float32)


def reduce(ranks: int, spec: str, feedback: bool) -> list[tuple[list, list]]:
    """Return each rank's results and residuals, by tensor."""
    codec = pycomm.codec(spec)

    def rank_main(c):
        residuals = [np.zeros(n, np.float32) if feedback else None for n in NUMEL]
        pieces = [
            Piece(n, codec, tensor=t, residual=r)
            for t, (n, r) in enumerate(zip(NUMEL, residuals, strict=True))
        ]
        data = np.concatenate([gradient(c.rank, t) for t in range(len(NUMEL))])
        assert c.all_reduce_coded(data, pieces, average=False, seed=SEED, step=STEP)
        return np.split(data, np.cumsum(NUMEL)[:-1]), residuals

    return run(ranks, rank_main)


@each_value
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "spec",
    [
        "topk:0.01",
        "topk:0.05,indices=int12",
        "randomk:10",
        "randomk:5,block=64",
        "lossless",
    ],
)
def test_what_travels_and_what_is_owed_is_all_there_was(spec, ranks):
    done = reduce(ranks, spec, feedback=True)
    for tensor in range(len(NUMEL)):
        for result, _ in done:
            assert result[tensor].tobytes() == done[0][0][tensor].tobytes()
        truth = sum(gradient(rank, tensor) for rank in range(ranks))
        owed = sum(residuals[tensor] for _, residuals in done)
        assert np.array_equal(done[0][0][tensor] + owed, truth)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_unbiased_random_values_are_scaled_once(ranks):
    codec = pycomm.codec("randomk:8,scale=unbiased")
    done = reduce(ranks, codec.spec(), feedback=False)
    for tensor, numel in enumerate(NUMEL):
        key = RandomKey(_C.hop_seed(SEED, SHARED), STEP, tensor)
        total = torch.from_numpy(sum(gradient(rank, tensor) for rank in range(ranks)))
        want = codec.decode(codec.encode(total, key=key), numel)
        for result, _ in done:
            assert np.array_equal(result[tensor], want.numpy())
