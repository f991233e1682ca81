"""Where the sums of several moments, one behind the other in a tensor, have their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pycomm.momentum import agreement
from pycomm.momentum.moment import EXTRA


class SumPlaces:
    """Places in the sums of moments that travel together.

    One operation goes over those of all moments: for each of a model's dozens of matrices alone,
    operations would take longer than their arithmetic.

    Args:
        sizes: number of sums of each moment.
        device: where the sums are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = list(sizes)
        ends = torch.tensor(self.sizes, dtype=torch.int64, device=device).cumsum(0)[:, None]
        self._numbers = _behind(ends - EXTRA, EXTRA - agreement.ROWS + 1)
        self._own = ends[:, 0] - agreement.ROWS - 1
        self._projections = _behind(ends - agreement.ROWS, agreement.ROWS)

    def measure(self, sums: torch.Tensor) -> None:
        """Write the squares of this rank's projections."""
        sums[self._own] = _squares(sums[self._projections])

    def condense(self, means: torch.Tensor) -> None:
        """Replace the ranks' mean of projections by its squares, which add up over shards."""
        projections = means[self._projections]
        squares = _squares(projections)
        projections.zero_()[:, 0] = squares
        means[self._projections] = projections

    def split(self, sums: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[list[float]]]:
        """Return the sums of each moment, after `condense`, and what it has besides.

        Returns:
            The sums; and for each moment squares of what the last coding has left, of its input, of
            the projections of each rank, and of those of the ranks' mean, and whether its sums are
            finite. The processor waits for the device once, for all of them.
        """
        parts = torch.split(sums, self.sizes)
        largest = torch.stack(torch._foreach_norm(parts, math.inf))
        both = torch.cat((sums[self._numbers], largest.isfinite().float()[:, None]), 1)
        found: list[list[float]] = both.tolist()
        return parts, found


def _behind(begin: torch.Tensor, count: int) -> torch.Tensor:
    return begin + torch.arange(count, dtype=torch.int64, device=begin.device)


def _squares(projections: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of rows: one half is added to the other, until one is left."""
    squares = projections.square()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0]
