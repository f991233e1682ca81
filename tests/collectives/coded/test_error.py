"""Whole all-reduces have the error of the formula: v of each coding, two in a row."""

from __future__ import annotations

import numpy as np
import pytest

import pycomm
from pycomm.communicator import Piece
from tests.ranks import run

NUMEL = 40_000
ONE_CODING = {"eden:bits=2": 0.1331, "eden:bits=5": 0.002511, "eden:bits=8": 0.0000412}


def gradient(rank: int) -> np.ndarray:
    return np.random.default_rng([rank, 5]).standard_normal(NUMEL).astype(np.float32)


def reduced(codec: str):
    def job(c):
        data = gradient(c.rank)
        piece = Piece(NUMEL, pycomm.codec(codec), tensor=0)
        assert c.all_reduce_coded(data, [piece], average=True, seed=91, step=3)
        return data

    return job


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("codec", ONE_CODING)
def test_the_error_of_a_whole_all_reduce_is_that_of_two_codings(codec, ranks):
    v = ONE_CODING[codec]
    exact = np.mean([gradient(r).astype(np.float64) for r in range(ranks)], axis=0)
    for data in run(ranks, reduced(codec)):
        error = np.square(data - exact).sum() / np.square(exact).sum()
        # Forty rotations; the squares of a few normal vectors add up to that of their sum in 2 %.
        assert error == pytest.approx(2 * v + v * v, rel=0.06)
