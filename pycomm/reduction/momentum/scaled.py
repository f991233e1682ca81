"""Operations on a matrix whose second moments are products of a row's and a column's factor.

`pycomm.reduction.momentum.moment` has the formulas. On the CPU, float32 goes over each matrix once
in C++ (csrc/optim/factored_moments.cpp), with as many threads as torch has; everything else in
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pycomm import _C
from pycomm.feedback import storage

_TINY = 1e-30
_BLOCK = 1 << 16  # values that are processed together, 256 KiB


def _blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Return ranges of rows that stay in a cache while several operations go over them."""
    rows, columns = matrix.shape
    if not matrix.is_cpu:
        return iter([slice(0, rows)])
    count = max(1, _BLOCK // max(1, columns))
    return (slice(begin, begin + count) for begin in range(0, rows, count))


def native(*tensors: torch.Tensor) -> bool:
    """Return whether C++ takes these tensors, by their addresses."""
    for one in tensors:  # a loop, since a generator takes twice the time, and many are small
        if not (one.is_cpu and one.dtype == torch.float32):
            return False
        if not one.is_contiguous() or one.is_neg():
            return False
    return True


def written(parameters: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Tell autograd that C++ has written parameters.

    A graph that was kept with their old values then refuses a backward, as after an operation of
    torch.
    """
    torch.autograd.graph.increment_version(parameters)


def _at(
    matrix: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> tuple[int, int, int, int, int]:
    rows, columns = matrix.shape
    return matrix.data_ptr(), rows, columns, row.data_ptr(), column.data_ptr()


def add_squares(matrix: torch.Tensor, row: torch.Tensor, column: torch.Tensor, unit: float) -> None:
    """Add the squares of a matrix, times `unit`, to its sums by row and by column (float32)."""
    if native(matrix):
        _C.factored_moments_add_squares(*_at(matrix, row, column), unit, torch.get_num_threads())
        return
    for rows in _blocks(matrix):
        squares = matrix[rows].float().square()
        row[rows].add_(squares.sum(1), alpha=unit)
        column.add_(squares.sum(0), alpha=unit)


def factors(
    row: torch.Tensor, column: torch.Tensor, weight: float, floor: float, padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors by row and by column whose products are the roots of the second moments.

    Args:
        row, column: sums of second moments by row and column, times `weight`, float32.
        weight: 0 or more.
        floor: least factor, relative to the root mean square of all of its kind.
        padded: rows of the result; those behind the given ones, which have no values, have 1.
    """
    rows = row.numel()
    if native(row, column):
        room = row.new_empty(padded + column.numel())
        whole, by_column = room[:padded], room[padded:]
        whole[rows:] = 1
        _C.factored_moments_factors(
            *(row.data_ptr(), rows, column.data_ptr(), column.numel(), weight, floor),
            *(whole.data_ptr(), by_column.data_ptr()),
        )
        return whole, by_column
    total = (column.sum() * weight).clamp_min(_TINY)
    parts = []
    # The rows' sums add up to that of the columns.
    for sums, mean in ((row / total, column.sum() / total / rows), (column, column.mean())):
        least = floor * mean.sqrt()
        parts.append(sums.sqrt().clamp_min_(least.clamp_min(_TINY)))
    whole = row.new_ones(padded)
    whole[:rows] = parts[0]
    return whole, parts[1]


def reciprocal_factors(
    row: torch.Tensor,
    column: torch.Tensor,
    weight: float,
    all_rows: int,
    least: float,
    floor: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reciprocals of such factors, after `least` was added to every second moment.

    Args:
        row: the sums of some rows.
        column, weight, floor: as for `factors`.
        all_rows: number of all rows.
        least: above 0.
        out: an earlier result of the same shapes, which is overwritten.
    """
    if native(row, column):
        by_row, by_column = out or (torch.empty_like(row), torch.empty_like(column))
        _C.factored_moments_reciprocal_factors(
            *(row.data_ptr(), row.numel(), column.data_ptr(), column.numel(), weight),
            *(all_rows, least, floor, by_row.data_ptr(), by_column.data_ptr()),
        )
        return by_row, by_column
    by_column = column + least * all_rows
    by_row = row + least * column.numel()
    total = by_column.sum()
    by_row.clamp_min_(floor**2 * total / all_rows)
    by_column.clamp_min_(floor**2 * total / column.numel())
    return (total * weight / by_row).sqrt_(), by_column.rsqrt_()


def fold(
    row: torch.Tensor, column: torch.Tensor, sums: torch.Tensor, decay: float, weight: float
) -> None:
    """Let sums of second moments decay, and add new ones with a weight.

    Args:
        row, column: float32 [rows] and [columns].
        sums: the new ones, float32 [rows + columns or more]; the rest is not read.
        decay: what the old ones are multiplied by.
        weight: of the new ones.
    """
    rows, columns = row.numel(), column.numel()
    if native(row, column, sums):
        at = sums.data_ptr()
        _C.factored_moments_fold(
            *(at, rows, at + 4 * rows, columns, decay, weight),
            *(row.data_ptr(), column.data_ptr()),
        )
        return
    row.mul_(decay).add_(sums[:rows], alpha=weight)
    column.mul_(decay).add_(sums[rows : rows + columns], alpha=weight)


def bound(gradient: torch.Tensor, energy: torch.Tensor, most: torch.Tensor) -> None:
    """Scale a gradient, whose squares add up to `energy`, down to `most`."""
    # Without a look at the numbers, for which the processor would wait for the device.
    share = (most / energy.clamp_min(_TINY)).sqrt_().clamp_max_(1.0)
    gradient.mul_(share.to(gradient.dtype))


def divide(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    beta: float,
    unit: float,
    *,
    add: bool,
    squares: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    most: torch.Tensor | None = None,
) -> None:
    """Replace a gradient g by (beta m + (1 - beta) unit g) / (row column).

    Args:
        gradient: g [rows, columns].
        momentum: m [rows or fewer, columns]; the other rows' is zero.
        row, column: float32 [rows] and [columns].
        beta: coefficient of the momentum.
        unit: what the gradient is multiplied by.
        add: False: leave the momentum out.
        squares: sums by row and column to which g's squares are added, as `add_squares` does.
        most: float32 without dimensions, above 0, with `squares`: a gradient whose squares add up
            to more is scaled down to it, after they were added.
    """
    if native(gradient, momentum):
        known = momentum.shape[0] if add and beta > 0 else 0
        row_sums, column_sums, sums_unit = squares or (None, None, 1.0)
        _C.factored_moments_divide(
            *_at(gradient, row, column),
            *(momentum.data_ptr() if known else 0, known, beta, unit),
            *(0 if sums is None else sums.data_ptr() for sums in (row_sums, column_sums)),
            *(sums_unit, 0.0 if most is None else float(most), torch.get_num_threads()),
        )
        return
    if squares is not None:
        own_row = torch.zeros_like(squares[0])
        add_squares(gradient, own_row, *squares[1:])
        squares[0].add_(own_row)
        if most is not None:
            bound(gradient, own_row.sum(), most)
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
    if native(matrix):
        _C.factored_moments_multiply(*_at(matrix, row, column), unit, torch.get_num_threads())
        return
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
        parameter: x [rows, ...], which is seen as [rows, columns].
        gradient: g, of the same shape, which is the new momentum.
        momentum: m, likewise.
        by_row, by_column: reciprocals of the denominators' factors, [rows] and [columns].
        lr: learning rate.
        keep: what weight decay leaves of the parameter.
        limit: bound of the clipped values; 0: none.
    """
    columns = by_column.numel()
    if native(parameter, gradient, momentum):
        _C.factored_moments_move(
            *(parameter.data_ptr(), by_row.numel(), columns),
            *(by_row.data_ptr(), by_column.data_ptr()),
            *(gradient.data_ptr(), momentum.data_ptr(), lr, keep, limit),
            torch.get_num_threads(),
        )
        written(parameter)
        return
    parameter, gradient, momentum = (
        one.view(-1, columns) for one in (parameter, gradient, momentum)
    )
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


def error_sums(values: torch.Tensor, residual: torch.Tensor) -> tuple[float, float]:
    """Return the sums of squares of a residual and of values + residual.

    Args:
        values: [numel].
        residual: as it is stored; see `pycomm.feedback.storage`.
    """
    numel = values.numel()
    if native(values) and residual.is_cpu and residual.dtype != torch.uint8:
        in_16 = residual.dtype == torch.bfloat16
        return _C.factored_moments_errors(values.data_ptr(), residual.data_ptr(), in_16, numel)
    left = storage.load(residual, numel)
    return float(left.square().sum()), float((left + values).square().sum())


def store_sent(
    values: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    to: torch.Tensor,
    *,
    add: bool = False,
) -> None:
    """Store what was sent of values whose coding had a residual: (x + before - after) row column.

    Args:
        values: x [rows, columns].
        row, column: float32 [rows] and [columns].
        before, after: the residual before and after the coding, as it is stored; see
            `pycomm.feedback.storage`. None: there is none.
        to: where it is stored.
        add: add what is there.
    """
    numel = values.numel()
    stored = [one for one in (before, after, to) if one is not None]
    fits = len(stored) == 3 and not add and all(s.dtype != torch.uint8 for s in stored)
    if fits and native(values) and before is not None and after is not None:
        _C.factored_moments_sent(
            *_at(values, row, column),
            *(before.data_ptr(), after.data_ptr(), before.dtype == torch.bfloat16),
            *(to.data_ptr(), to.dtype == torch.bfloat16, torch.get_num_threads()),
        )
        return
    sent = values.reshape(-1).float()
    if before is not None and after is not None:
        sent = sent + storage.load(before, numel)
        sent -= storage.load(after, numel)
    elif sent.data_ptr() == values.data_ptr():
        sent = sent.clone()
    multiply(sent.view(values.shape), row, column, 1.0)
    if add:
        sent += storage.load(to, numel)
    storage.store(sent, to)
