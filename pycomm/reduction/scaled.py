"""Operations on a matrix whose second moments are products of a row's and a column's factor.

`pycomm.reduction.moment` has the formulas. Each goes over the matrix once, in blocks of rows that
stay in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 1 << 16  # values that are processed together, 256 KiB


def _blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Return ranges of rows that stay in a cache while several operations go over them."""
    rows, columns = matrix.shape
    if not matrix.is_cpu:
        return iter([slice(0, rows)])
    count = max(1, _BLOCK // max(1, columns))
    return (slice(begin, begin + count) for begin in range(0, rows, count))


def add_squares(matrix: torch.Tensor, row: torch.Tensor, column: torch.Tensor, unit: float) -> None:
    """Add the squares of a matrix, times `unit`, to its sums by row and by column (float32)."""
    for rows in _blocks(matrix):
        squares = matrix[rows].float().square()
        row[rows].add_(squares.sum(1), alpha=unit)
        column.add_(squares.sum(0), alpha=unit)


def divide(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    beta: float,
    unit: float,
    *,
    add: bool,
) -> None:
    """Replace a gradient g by (beta m + (1 - beta) unit g) / (row column).

    Args:
        gradient: g [rows, columns].
        momentum: m [rows or fewer, columns]; the other rows' is zero.
        row, column: float32 [rows] and [columns].
        beta: coefficient of the momentum.
        unit: what the gradient is multiplied by.
        add: False: leave the momentum out.
    """
    by_row, by_column = row.reciprocal()[:, None], column.reciprocal()
    known = momentum.shape[0]
    for rows in _blocks(gradient):
        part = gradient[rows]
        if unit != 1:
            part.mul_(unit)
        if not add:
            part.mul_(1 - beta)
        elif beta > 0:
            there = part[: max(0, known - rows.start)]
            there.lerp_(momentum[rows].to(part.dtype), beta)
            part[len(there) :].mul_(1 - beta)
        part.mul_(by_row[rows]).mul_(by_column)


def multiply(matrix: torch.Tensor, row: torch.Tensor, column: torch.Tensor, unit: float) -> None:
    """Multiply a matrix by unit row column."""
    by_row = row[:, None] * unit
    for rows in _blocks(matrix):
        matrix[rows].mul_(by_row[rows]).mul_(column)


def move(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    by_row: torch.Tensor,
    by_column: torch.Tensor,
    *,
    lr: float,
    keep: float,
    limit: float,
) -> None:
    """Take a step: m <- g; x <- keep x - lr clip(g by_row by_column).

    Args:
        parameter: x [rows, columns].
        gradient: g, which is the new momentum.
        momentum: m.
        by_row, by_column: reciprocals of the denominators' factors.
        lr: learning rate.
        keep: what weight decay leaves of the parameter.
        limit: bound of the clipped values; 0: none.
    """
    for rows in _blocks(parameter):
        momentum[rows].copy_(gradient[rows])
        moved = gradient[rows].float() * by_row[rows][:, None]
        moved.mul_(by_column)
        if limit:
            moved.clamp_(-limit, limit)
        part = parameter[rows]
        if keep != 1:
            part.mul_(keep)
        part.add_(moved.to(part.dtype), alpha=-lr)
