"""The share of the ranks' squares that belongs to their mean."""

from __future__ import annotations

import pytest
import torch

from pycomm.reduction.momentum import agreement
from tests.extent import each_value


def measured(ranks: int, noise: float, steps: int, rows: int = 200, columns: int = 48) -> float:
    """Return the share over some steps of gradients with a common part of square 1."""
    generator = torch.Generator().manual_seed(ranks)
    of_mean = own = 0.0
    for step in range(steps):
        common = torch.randn(rows, columns, generator=generator)
        found = []
        for _ in range(ranks):
            gradient = common + noise * torch.randn(rows, columns, generator=generator)
            one = torch.zeros(agreement.ROWS)
            agreement.add_projections(gradient, 0, rows, step, one)
            found.append(one)
        of_mean += float((sum(found) / ranks).square().sum())
        own += float(sum(one.square().sum() for one in found)) / ranks
    return agreement.share(of_mean, own, ranks)


@each_value
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
def test_it_is_the_squares_of_the_mean_over_the_mean_of_squares(ranks, noise):
    wanted = (1 + noise**2 / ranks) / (1 + noise**2)
    found = measured(ranks, noise, steps=60)
    if noise == 0:
        assert found == 1  # equal gradients have equal projections
    else:  # 60 steps of 50 rows or more: the standard deviation of a mean of squares is 0.026
        assert found == pytest.approx(wanted, rel=0.12)


def test_shards_have_the_projections_of_the_whole():
    whole, parts = torch.zeros(agreement.ROWS), torch.zeros(agreement.ROWS)
    gradient = torch.randint(-9, 10, (150, 30)).float()
    for step in range(4):
        agreement.add_projections(gradient, 0, 150, step, whole)
        for begin in range(0, 150, 52):
            rows = gradient[begin : begin + 52]
            agreement.add_projections(rows, begin, 150, step, parts)
    assert torch.equal(whole, parts)
    assert int(whole.count_nonzero()) >= 48


def test_every_row_has_its_turn():
    seen = torch.zeros(200)
    for step in range(4):  # 200 rows, 64 at most at once
        for row in range(200):
            gradient = torch.zeros(200, 8)
            gradient[row] = torch.arange(1.0, 9.0)
            found = torch.zeros(agreement.ROWS)
            agreement.add_projections(gradient, 0, 200, step, found)
            seen[row] += float(found.abs().sum() > 0)
    assert bool((seen == 1).all())


def test_bounds():
    assert agreement.share(0.0, 0.0, 4) == 1  # nothing was measured yet
    assert agreement.share(1e-9, 1.0, 4) == 0.25
    assert agreement.share(2.0, 1.0, 4) == 1
