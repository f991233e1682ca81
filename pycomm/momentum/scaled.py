"""Passes over matrices whose second moments are products of a row's and a column's factor.

`pycomm.momentum.moment` has the formulas. Each pass takes all matrices of a bucket or of
a step. On the CPU, matrices that are all float32 go through C++ in one call
(csrc/optim/moments.cpp), with as many threads as torch has; others in torch, which is the
definition: for finite values the bits are the same. On a device, matrices without factors go
through its kernels, in one launch for dozens of them; in torch sums have its own order there, since
that of C++ would take a launch for each few numbers. (`on_device` has the passes for matrices with
factors.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.feedback import storage
from pycomm.momentum.on_device.kernels import Kernels

_TINY = 1e-30
_LANES, _PATCH, _BLOCK = 32, 256, 64  # of sums, whose order csrc/optim/moments.h says
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2, torch.float16: 3}
"""Numbers of stored values' forms, csrc/optim/moments_params.h; the last one is a device's."""


def native(*tensors: torch.Tensor) -> bool:
    """Return whether C++ takes these tensors, by their addresses."""
    for one in tensors:  # a loop, since a generator takes twice the time, and many are small
        if not (one.is_cpu and one.dtype == torch.float32):
            return False
        if not one.is_contiguous() or one.is_neg():
            return False
    return True


def _stored(*tensors: torch.Tensor | None) -> bool:
    """Return whether C++ takes these stored values."""
    for one in tensors:
        if one is not None and not (one.is_cpu and FORMS.get(one.dtype, 3) < 3):
            return False
        if one is not None and not one.is_contiguous():
            return False
    return True


def _on_device(*tensors: torch.Tensor | None) -> bool:
    """Return whether the kernels of a device take these tensors, by their addresses."""
    for one in tensors:
        if one is not None and (one.is_cpu or one.dtype not in FORMS or not one.is_contiguous()):
            return False
    return True


def written(parameters: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Tell autograd that C++ has written parameters.

    A graph that was kept with their old values then refuses a backward, as after an operation of
    torch.
    """
    torch.autograd.graph.increment_version(parameters)


def _at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _form(stored: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if stored is None else (stored.data_ptr(), FORMS[stored.dtype])


# ------------------------------------------------------------------------------------------- sums


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of the rows of a float32 matrix, in the order of csrc/optim/moments.h."""
    if not x.is_cpu:
        return x.sum(1)
    rows, columns = x.shape
    patches = max(1, -(-columns // _PATCH))
    padded = F.pad(x, (0, patches * _PATCH - columns)).view(rows, patches, _PATCH // _LANES, _LANES)
    lanes = padded[:, :, 0]
    for k in range(1, padded.shape[2]):
        lanes = lanes + padded[:, :, k]
    half = _LANES
    while half > 1:
        half //= 2
        lanes = lanes[..., :half] + lanes[..., half:]
    sums = lanes[:, 0, 0]
    for p in range(1, patches):
        sums = sums + lanes[:, p, 0]
    return sums


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of the columns of a float32 matrix, in the same way."""
    if not x.is_cpu:
        return x.sum(0)
    rows, columns = x.shape
    blocks = max(1, -(-rows // _BLOCK))
    padded = F.pad(x, (0, 0, 0, blocks * _BLOCK - rows)).view(blocks, _BLOCK // 2, 2, columns)
    pairs = padded[:, :, 0] + padded[:, :, 1]
    parts = pairs[:, 0]
    for k in range(1, pairs.shape[1]):
        parts = parts + pairs[:, k]
    sums = parts[0]
    for b in range(1, blocks):
        sums = sums + parts[b]
    return sums


def total(vector: torch.Tensor) -> torch.Tensor:
    """Return the sum of a float32 vector, as that of a row."""
    if not vector.is_cpu:
        return vector.sum()
    return row_sums(vector.reshape(1, -1))[0]


def _number(value: float, like: torch.Tensor) -> Any:
    """Return a float32 tensor, by which torch divides on the CPU: by a number it would multiply.

    On a device it is a number, which takes no launch.
    """
    return torch.tensor(value, dtype=torch.float32, device="cpu") if like.is_cpu else value


def _root(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return square roots. Torch does not round those of float32 correctly on all processors."""
    if not x.is_cpu:
        return torch.sqrt(x, out=out)
    roots = x.double().sqrt()
    return roots.float() if out is None else out.copy_(roots)


# ----------------------------------------------------------------------------------------- encode


@dataclass
class Encoding:
    """One matrix of `encode`; float32 where nothing else is said."""

    values: torch.Tensor
    """g [rows, columns], which becomes p. Floats of 16 or 32 bits."""
    real: int
    """Rows before the padding."""
    row: torch.Tensor | None = None
    """Factors of the denominators [rows]; None: they are 1."""
    column: torch.Tensor | None = None
    """[columns], with those of rows."""
    momentum: torch.Tensor | None = None
    """m as residuals are stored, or floats [known * columns or more]; None: it is left out."""
    known: int = 0
    """Rows of the momentum; that of the others is zero."""
    beta: float = 0.0
    """What the momentum is multiplied by; g is by (1 - beta) unit."""
    unit: float = 1.0
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    """By row [real] and by column, to which unit^2 times g's squares are added."""
    bound: tuple[torch.Tensor, float] | None = None
    """With `sums`: they grow at most by the sum of this vector [real] times this number; a gradient
    of more is scaled down, after its squares were added."""
    projections: tuple[torch.Tensor, int, int, torch.Tensor] | None = None
    """Signs [columns], and the first row and the distance of those whose sums with these signs,
    times `unit`, are added to the tensor."""
    residual: torch.Tensor | None = None
    """e, by which p is coded, as it is stored."""
    errors: torch.Tensor | None = None
    """[2], to which the sums of squares of e and of p + e are added; [3] with a zero without
    factors, since the kernels of a device count there."""
    copy: torch.Tensor | None = None
    """Where p is written, too, of as many values."""
    gradient: torch.Tensor | None = None
    """g, without factors: floats [rows, ...] that stay as they are; `values` is only written."""
    parameter: torch.Tensor | None = None
    """x, likewise; None: it does not decay."""
    decay: float = 0.0
    """g is added to by this times x, with a `gradient`."""

    @property
    def rest(self) -> float:
        """What g is multiplied by."""
        return (1 - self.beta) * self.unit


def encode(encodings: Sequence[Encoding]) -> None:
    """Replace gradients g by p = (beta m + rest (g + decay x)) / (row column).

    One that has neither factors nor a `gradient` stays as it is, for its sums.
    """
    if all(map(_encodes_natively, encodings)):
        _C.moments_encode([_encode_at(one) for one in encodings], torch.get_num_threads())
        return
    if all(map(_encodes_on_device, encodings)):
        kernels = Kernels.find("moments", encodings[0].values.device)
        if kernels is not None:
            _encode_by(kernels, encodings)
            return
    for one in encodings:
        _encode(one)


def _encodes_natively(e: Encoding) -> bool:
    floats = (t for t in (e.values, e.copy, e.gradient, e.parameter) if t is not None)
    return native(*floats) and _stored(e.momentum, e.residual)


def _encodes_on_device(e: Encoding) -> bool:
    if e.row is not None or e.gradient is None:
        return False
    return _on_device(e.values, e.gradient, e.parameter, e.copy, e.momentum, e.residual, e.errors)


def _encode_by(kernels: Kernels, encodings: Sequence[Encoding]) -> None:
    """Do it by kernels of a device."""
    shapes = [e.values.shape for e in encodings if e.errors is not None]
    cells = sum(rows * -(-columns // _PATCH) for rows, columns in shapes)
    scratch = encodings[0].values.new_empty(2 * cells)
    kernels.call(
        _C.moments_encode_on_device, [_encode_at(e) for e in encodings], scratch.data_ptr()
    )


def _encode_at(e: Encoding) -> tuple[Any, ...]:
    # Without a call of Python for what an encoding does not have: there is one for each parameter.
    second: tuple[Any, ...] = _NO_SECOND_MOMENTS
    if e.sums is not None or e.projections is not None:
        row_sums_, column_sums_ = e.sums or (None, None)
        bounds, most = e.bound or (None, 0.0)
        signs, first, stride, projections = e.projections or (None, 0, 1, None)
        second = (
            (_at(row_sums_), _at(column_sums_), e.unit**2),
            (_at(bounds), most),
            (_at(signs), first, stride, _at(projections), e.unit),
        )
    row, column = (0, 0) if e.row is None else (_at(e.row), _at(e.column))
    momentum, residual, gradient, parameter = [
        _NONE if t is None else (t.data_ptr(), FORMS[t.dtype])
        for t in (e.momentum, e.residual, e.gradient, e.parameter)
    ]
    errors = 0 if e.errors is None else e.errors.data_ptr()
    copy = 0 if e.copy is None else e.copy.data_ptr()
    return (
        (e.values.data_ptr(), *e.values.shape, row, column),
        *(e.real, (momentum, e.known, e.beta, (1 - e.beta) * e.unit), *second),
        *(residual, errors, copy, (gradient, parameter, e.decay)),
    )


_NONE = (0, 0)
_NO_SECOND_MOMENTS = ((0, 0, 0.0), (0, 0.0), (0, 0, 1, 0, 0.0))
"""No sums, no bound and no projections."""


def _encode(e: Encoding) -> None:
    """Do the same in torch."""
    p, share = e.values.float(), None
    if e.gradient is not None:
        p = e.gradient.reshape(e.values.shape).float()
        if e.parameter is not None:
            p = p + e.parameter.reshape(e.values.shape).float() * e.decay
    real, columns = p[: e.real], p.shape[1]
    if e.projections is not None:
        signs, first, stride, to = e.projections
        found = row_sums(real[first::stride] * signs).mul_(e.unit)
        to[: len(found)] += found
    if e.sums is not None:
        squares = real * real
        rows = row_sums(squares)
        if e.bound is not None:
            # Without a look at the numbers, for which the processor would wait for the device.
            most = total(e.bound[0]).mul_(e.bound[1]).clamp_min_(_TINY)
            share = _root(most / total(rows).mul_(e.unit**2)).clamp_max_(1.0)
        e.sums[0].add_(rows.mul_(e.unit**2))
        e.sums[1].add_(column_sums(squares).mul_(e.unit**2))
    if e.row is None and e.gradient is None:
        return  # there was nothing to do but that
    by_row, by_column = _reciprocals(e.row, e.column)
    p = p * e.rest
    there = p[: e.known]
    m = there if e.momentum is None else _floats(e.momentum, e.known, columns)
    if e.momentum is not None:
        there.add_(m * e.beta)
    p.mul_(by_row).mul_(by_column)
    if share is not None:
        p.mul_(share)
        if e.momentum is not None:
            rest = m * ((1 - share) * e.beta)
            there.add_(rest.mul_(by_row[: e.known]).mul_(by_column))
    e.values.copy_(p)
    if e.copy is not None:
        e.copy.view(-1).copy_(e.values.view(-1))
    if e.errors is not None and e.residual is not None:
        left = _floats(e.residual, *p.shape)
        sums = [total(row_sums(errors * errors)) for errors in (left, p.add_(left))]
        e.errors[:2].add_(torch.stack(sums))


def _reciprocals(row: torch.Tensor | None, column: torch.Tensor | None) -> tuple[Any, Any]:
    """Return those of factors, to be multiplied by a matrix."""
    if row is None or column is None:
        return 1.0, 1.0
    return row.reciprocal()[:, None], column.reciprocal()


def _floats(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the first rows of stored values."""
    numel = rows * columns
    return storage.load(stored, numel).reshape(-1)[:numel].view(rows, columns)


# ------------------------------------------------------------------------------ what comes of that


@dataclass
class Sent:
    """One matrix of `store_sent`."""

    values: torch.Tensor
    """x [rows, columns]."""
    row: torch.Tensor | None
    """float32 [rows]; None: the factors are 1."""
    column: torch.Tensor | None
    """float32 [columns], with those of rows."""
    before: torch.Tensor | None
    """The residual before the coding, as it is stored; see `pycomm.feedback.storage`."""
    after: torch.Tensor | None
    """The same after it. None, as before it: there is none."""
    to: torch.Tensor
    """Where the result is stored."""


def store_sent(parts: Sequence[Sent]) -> None:
    """Store what was sent of coded values: (x + before - after) row column."""
    if all(native(s.values) and _stored(s.before, s.after, s.to) for s in parts):
        _C.moments_sent([_sent_at(s) for s in parts], torch.get_num_threads())
        return
    if all(s.row is None and _on_device(s.values, s.before, s.after, s.to) for s in parts):
        kernels = Kernels.find("moments", parts[0].values.device)
        if kernels is not None:
            kernels.call(_C.moments_sent_on_device, [_sent_at(s) for s in parts])
            return
    for one in parts:
        _store_sent(one)


def _sent_at(s: Sent) -> tuple[Any, ...]:
    place = (s.values.data_ptr(), *s.values.shape, _at(s.row), _at(s.column))
    return (place, _form(s.before), _form(s.after), _form(s.to))


def _store_sent(s: Sent) -> None:
    sent, numel = s.values.float() * 1, s.values.numel()
    flat = sent.view(-1)
    if s.before is not None and s.after is not None:
        flat.add_(storage.load(s.before, numel)).sub_(storage.load(s.after, numel))
    if s.row is not None and s.column is not None:
        sent.mul_(s.row[:, None]).mul_(s.column)
    storage.store(flat, s.to)


Matrix = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Values [rows, columns], and their factors by row and by column, float32; None: they have none."""


@dataclass
class Probe:
    """Two values of a matrix, by which `move` finds out what its gradient was multiplied by since.

    They are the largest and the smallest that is not 0, of the first 2,048.
    """

    places: torch.Tensor
    """int64 [2], on the device of the values, as the processor is not to wait for a device."""
    values: torch.Tensor
    """float32 [2]; 0: they tell nothing."""


_PROBED = 2048  # csrc/optim/moments.h


def land(matrices: Sequence[Matrix], unit: float) -> list[Probe]:
    """Multiply matrices by unit row column, but those without factors.

    Returns:
        A probe of each, divided by unit.
    """
    if not all(native(values) for values, _, _ in matrices):
        for one in matrices:
            _land(one, unit)
        return probes([values for values, _, _ in matrices], unit)
    return [
        Probe(
            torch.tensor(at[:2], dtype=torch.int64, device="cpu"),
            torch.tensor(at[2:], dtype=torch.float32, device="cpu"),
        )
        for at in _C.moments_land(
            [
                (values.data_ptr(), *values.shape, _at(row), _at(column))
                for values, row, column in matrices
            ],
            *(unit, torch.get_num_threads()),
        )
    ]


def _land(matrix: Matrix, unit: float) -> None:
    values, row, column = matrix
    if row is None or column is None:
        return
    row = row[:, None] * unit if unit != 1 else row[:, None]
    if values.dtype == torch.float32:
        values.mul_(row).mul_(column)
    else:
        values.copy_(values.float() * row * column)


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first values of each, float32 [tensors, 2,048], with zeros behind them."""
    rows = [one.reshape(-1)[:_PROBED] for one in tensors]
    short = [_PROBED - row.numel() for row in rows]
    rows = [F.pad(row, (0, n)) if n else row for row, n in zip(rows, short, strict=True)]
    return torch.stack(rows).float()


def probes(matrices: Sequence[torch.Tensor], unit: float) -> list[Probe]:
    """Return the probes of all, divided by `unit`, in a dozen operations."""
    first = _first(matrices)
    sizes = first.abs()
    there = sizes > 0
    largest = sizes.where(there, -1).argmax(1)
    smallest = sizes.where(there, math.inf).argmin(1)
    places = torch.stack((largest, smallest), 1)
    values = first.gather(1, places) / _number(unit, first)
    return [Probe(*one) for one in zip(places.unbind(), values.unbind(), strict=True)]


@dataclass
class Move:
    """One parameter of `move`."""

    parameter: torch.Tensor
    """x [rows, ...], which is seen as [rows, columns]."""
    gradient: torch.Tensor
    """g, of the same shape, which is the new momentum."""
    momentum: torch.Tensor | None
    """m, likewise; None: it is not kept, without factors."""
    row: torch.Tensor | None
    """Reciprocals of the denominators' factors, float32 [rows]; None: they are 1."""
    column: torch.Tensor | None
    """float32 [columns], with those of rows."""
    lr: float
    keep: float
    """What weight decay leaves of the parameter."""
    limit: float
    """Bound of the clipped values; 0: none."""
    probe: Probe | None = None
    """Of g when it was landed; None: it is not known."""


def move(moves: Sequence[Move]) -> None:
    """Take steps, where g is what it was when it was landed: m <- g; x <- keep x - lr clip(g row
    column)."""
    if all(
        native(*(t for t in (m.parameter, m.gradient, m.momentum) if t is not None)) for m in moves
    ):
        _C.moments_move([_move_at(m) for m in moves], torch.get_num_threads())
    elif (kernels := _moving_kernels(moves)) is not None:
        for dtype in {m.parameter.dtype for m in moves}:
            each = [_move_at(m) for m in moves if m.parameter.dtype == dtype]
            kernels.call(_C.moments_move_on_device, each, core_dtype(dtype))
    else:
        for one, restore in zip(moves, _restoring(moves), strict=True):
            _move(one, restore)
        return
    written([m.parameter for m in moves])


_NOTHING = (0, 0, 0.0, 0.0)


def _shape_of(m: Move) -> tuple[int, int]:
    if m.row is not None and m.column is not None:
        return m.row.numel(), m.column.numel()
    return rows_and_columns(m.parameter)


def rows_and_columns(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the shape of the matrix that a tensor is seen as; one of one dimension is a row."""
    rows = tensor.shape[0] if tensor.ndim > 1 else 1
    return rows, tensor.numel() // max(1, rows)


def _move_at(m: Move) -> tuple[Any, ...]:
    return (
        (_at(m.parameter), *_shape_of(m), _at(m.row), _at(m.column)),
        *(_at(m.gradient), _at(m.momentum), m.lr, m.keep, m.limit),
        (*m.probe.places.tolist(), *m.probe.values.tolist()) if m.probe else _NOTHING,
    )


def _moving_kernels(moves: Sequence[Move]) -> Kernels | None:
    for m in moves:
        if m.row is not None or not _on_device(m.parameter, m.gradient, m.momentum):
            return None
        if m.gradient.dtype != torch.float32:
            return None
        if m.momentum is not None and m.momentum.dtype != m.parameter.dtype:
            return None
    return Kernels.find("moments", moves[0].parameter.device)


def _move(m: Move, restore: torch.Tensor | None) -> None:
    shape = _shape_of(m)
    x, g = m.parameter.view(shape), m.gradient.view(shape)
    momentum = torch.empty_like(g) if m.momentum is None else m.momentum.view(shape)
    if restore is None:
        momentum.copy_(g)
        now = g.float()
    elif g.dtype == momentum.dtype == torch.float32:
        now = torch.mul(g, restore, out=momentum)
    else:
        now = g.float() * restore
        momentum.copy_(now)
    if m.row is None or m.column is None:
        moved = now * m.lr
    else:
        moved = (now * m.row[:, None]).mul_(m.column)
        if m.limit:
            moved.clamp_(-m.limit, m.limit)
        moved.mul_(m.lr)
    if x.dtype in (torch.float32, torch.float64):
        x.mul_(m.keep).sub_(moved)
    else:
        x.copy_((x.float() * m.keep).sub_(moved))


def _restoring(moves: Sequence[Move]) -> list[torch.Tensor | None]:
    """Return what gradients have to be multiplied by to be what they were when they were landed.

    Clipping multiplies gradients by a number, on which Adam's steps do not depend, and these are
    the momentum. 1: it was not multiplied, or not all of it. Numbers stay on the device.
    """
    found: list[torch.Tensor | None] = [None] * len(moves)
    known = [(i, m.gradient, m.probe) for i, m in enumerate(moves) if m.probe is not None]
    if not known:
        return found
    gradients = [gradient for _, gradient, _ in known]
    places = torch.stack([probe.places for _, _, probe in known])
    by, other = (
        _first(gradients).gather(1, places) / torch.stack([probe.values for _, _, probe in known])
    ).unbind(1)
    # Of the values' rounding.
    each = [2.0**-16 if g.dtype == torch.float32 else 2.0**-6 for g in gradients]
    tolerance = (
        torch.tensor(each, dtype=by.dtype, device=by.device) if len({*each}) > 1 else each[0]
    )
    scaled_ = ((by - 1).abs() > tolerance) & ((other - by).abs() <= by * tolerance)
    scaled_ &= (by > 1e-12) & (by < 1e12) & (places[:, 0] != places[:, 1])
    for (i, _, _), one in zip(known, (1 / by).where(scaled_, 1).unbind(), strict=True):
        found[i] = one
    return found


# ---------------------------------------------------------------------------------------- factors


FLOOR: float = _C.MOMENT_FLOOR
"""Least factor of a row or column, relative to their root mean square; less of what is heard in
most steps (csrc/optim/moments_params.h)."""
_HEARD_DECAY: float = _C.MOMENT_HEARD_DECAY
_EVEN: float = _C.MOMENT_EVEN
_LEAST_SHARE: float = _C.MOMENT_LEAST_SHARE

Heard = tuple[torch.Tensor, torch.Tensor]
"""Of each row or column, moving averages of its share in the squares of a step, relative to the
mean one, and of the share's square; float32 [rows] or [columns]."""


@dataclass
class Sums:
    """Second moments of a matrix."""

    row: torch.Tensor
    """Their sums by row, times `weight`, float32 [rows]."""
    column: torch.Tensor
    """[columns]."""
    weight: float = 1.0
    row_heard: Heard | None = None
    """How evenly rows are heard; None: it is not known, and all have the whole floor."""
    column_heard: Heard | None = None

    def at(self) -> tuple[Any, ...]:
        """Return the addresses, for C++."""
        row, column = self.row, self.column
        by_row = (row.data_ptr(), row.numel(), _heard_at(self.row_heard))
        by_column = (column.data_ptr(), column.numel(), _heard_at(self.column_heard))
        return (*by_row, *by_column, self.weight)


def _heard_at(heard: Heard | None) -> tuple[int, int]:
    return (0, 0) if heard is None else (heard[0].data_ptr(), heard[1].data_ptr())


def _floor_share(heard: Heard | None) -> torch.Tensor | float:
    """Return the share that rows or columns have of the floor's square.

    The square of a mean over the mean of squares is 1 where shares are the same in all steps, and
    the part of the steps in which it is heard where it is silent in the others; less while the
    averages are young.
    """
    if heard is None:
        return 1.0
    mean, square = heard
    even = mean * mean / square.clamp_min(_TINY)
    share: torch.Tensor = 1 - even / _number(_EVEN, even)
    return share.clamp_min_(_LEAST_SHARE)


def _root_of_share(heard: Heard | None) -> torch.Tensor | float:
    share = _floor_share(heard)
    return _root(share) if isinstance(share, torch.Tensor) else share


def _listen(heard: Heard | None, fresh: torch.Tensor, steps: int) -> None:
    """Let the sums of rows or columns, the mean of so many steps, enter the averages."""
    if heard is None:
        return
    mean, square = heard
    count = _number(fresh.numel(), fresh)
    share = fresh / (total(fresh) / count).clamp_min_(_TINY)
    slow = math.prod([_HEARD_DECAY] * steps)
    # A mean over steps differs from one time to the next by less than a step's share does: its
    # variance is a part of theirs. All means together are 1, but for what they have not heard yet.
    known = total(mean) / count
    away = torch.where(known > _TINY, share - mean / known.clamp_min(_TINY), 0)
    away.square_().mul_(steps - 1)
    mean.mul_(slow).add_(share * (1 - slow))
    square.mul_(slow).add_(share.square_().add_(away).mul_(1 - slow))


def factors(sums: Sums, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors by row and by column whose products are the roots of the second moments.

    None is below `FLOOR` times the root mean square of its kind, or its part of that, which is
    less where it is heard in most steps.

    Args:
        sums: the second moments.
        padded: rows of the result; those behind the given ones, which have no values, have 1.
    """
    row, column, weight = sums.row, sums.column, sums.weight
    rows, columns = row.numel(), column.numel()
    room = row.new_empty(padded + columns)
    whole, by_column = room[:padded], room[padded:]
    if padded > rows:
        whole[rows:] = 1
    if native(row, column):
        _C.moments_factors(sums.at(), whole.data_ptr(), by_column.data_ptr())
        return whole, by_column
    of_columns = total(column)
    all_ = (of_columns * weight).clamp_min(_TINY)
    root_row = _root(of_columns / all_ / _number(rows, row))
    root_column = _root(of_columns / _number(columns, row))
    least_row = (FLOOR * root_row * _root_of_share(sums.row_heard)).clamp_min(_TINY)
    least_column = (FLOOR * root_column * _root_of_share(sums.column_heard)).clamp_min(_TINY)
    whole[:rows] = torch.maximum(_root(row / all_), least_row)
    torch.maximum(_root(column), least_column, out=by_column)
    return whole, by_column


def reciprocal_factors(
    sums: Sums,
    all_rows: int,
    least: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reciprocals of such factors, after `least` was added to every second moment.

    Args:
        sums: the second moments, of some rows.
        all_rows: number of all rows.
        least: above 0.
        out: an earlier result of the same shapes, which is overwritten.
    """
    row, column = sums.row, sums.column
    by_row, by_column = out or (torch.empty_like(row), torch.empty_like(column))
    if native(row, column):
        _C.moments_reciprocal_factors(
            sums.at(), all_rows, least, by_row.data_ptr(), by_column.data_ptr()
        )
        return by_row, by_column
    rows, columns = _number(all_rows, row), _number(column.numel(), row)
    least_ = _number(least, row)
    columns_, rows_ = column + least_ * rows, row + least_ * columns
    of_columns = total(columns_)
    least_row = FLOOR**2 * (of_columns / rows) * _floor_share(sums.row_heard)
    least_column = FLOOR**2 * (of_columns / columns) * _floor_share(sums.column_heard)
    _root(of_columns * sums.weight / torch.maximum(rows_, least_row), out=by_row)
    torch.reciprocal(_root(torch.maximum(columns_, least_column)), out=by_column)
    return by_row, by_column


def fold(sums: Sums, fresh: torch.Tensor, decay: float, weight: float, steps: int) -> None:
    """Let sums of second moments decay, and add new ones with a weight.

    Args:
        sums: the old ones; their own `weight` is not read.
        fresh: the new ones, float32 [rows + columns or more]; the rest is not read.
        decay: what the old ones are multiplied by.
        weight: of the new ones.
        steps: number of steps of which the new ones are the mean.
    """
    row, column = sums.row, sums.column
    rows, columns = row.numel(), column.numel()
    if native(row, column, fresh):
        _C.moments_fold(sums.at(), fresh.data_ptr(), decay, weight, steps)
        return
    given = fresh[: rows + columns]
    more = given * weight
    row.mul_(decay).add_(more[:rows])
    column.mul_(decay).add_(more[rows:])
    _listen(sums.row_heard, given[:rows], steps)
    _listen(sums.column_heard, given[rows:], steps)
