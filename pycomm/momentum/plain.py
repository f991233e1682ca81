"""Passes over matrices without factors, of an optimizer that divides by nothing.

Each pass takes all matrices of a step in one call of C++ (csrc/optim/moments.h), on the host as by
kernels of a device. Tensors have no gaps, and lie on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm.arrays import core_dtype
from pycomm.momentum.kernels import Kernels, written

_PATCH = 256  # of sums, whose order csrc/optim/moments.h says
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2, torch.float16: 3}
"""Numbers of stored values' forms, csrc/optim/moments_params.h."""


@dataclass
class Encoding:
    """One matrix of `encode`."""

    values: torch.Tensor
    """float32 [rows, columns], of which p is made."""
    gradient: torch.Tensor
    """g, floats of 16 or 32 bits [rows, ...]."""
    momentum: torch.Tensor | None = None
    """m, likewise, or as residuals are stored; None: it is left out."""
    beta: float = 0.0
    """What the momentum is multiplied by; g is by (1 - beta) unit."""
    unit: float = 1.0
    residual: torch.Tensor | None = None
    """e, by which p is coded, as it is stored."""
    errors: torch.Tensor | None = None
    """float32 [3]: what the sums of squares of e and of p + e are added to, and a zero, since the
    kernels of a device count there."""
    copy: torch.Tensor | None = None
    """Where p is written, too, of as many values."""
    parameter: torch.Tensor | None = None
    """x, floats [rows, ...]; None: it does not decay."""
    decay: float = 0.0
    """g is added to by this times x."""


@dataclass
class Sent:
    """One matrix of `store_sent`."""

    values: torch.Tensor
    """x, float32 [rows, columns]."""
    before: torch.Tensor | None
    """The residual before the coding, as it is stored; see `pycomm.feedback.storage`."""
    after: torch.Tensor | None
    """The same after it. None, as before it: there is none."""
    to: torch.Tensor
    """Where the result is stored; may be the values."""


@dataclass
class Move:
    """One parameter of `move`."""

    parameter: torch.Tensor
    """x, floats of 16 or 32 bits [rows, ...]."""
    gradient: torch.Tensor
    """g, float32 of the same shape, which is the new momentum."""
    momentum: torch.Tensor | None
    """m, like the parameter; None: it is not kept."""
    lr: float


def encode(encodings: Sequence[Encoding]) -> None:
    """Write p = beta m + (1 - beta) unit (g + decay x)."""
    kernels = Kernels.find("moments", encodings[0].values.device)
    made = []
    cells = 0
    for e in encodings:  # without a call of Python for each: there is one for each parameter
        rows, columns = e.values.shape
        if e.errors is not None:
            cells += rows * -(-columns // _PATCH)
        gradient, parameter, momentum, residual = [
            (0, 0) if t is None else (t.data_ptr(), FORMS[t.dtype])
            for t in (e.gradient, e.parameter, e.momentum, e.residual)
        ]
        made.append(
            (
                *(e.values.data_ptr(), (rows, columns), (gradient, parameter, momentum)),
                *((e.beta, (1 - e.beta) * e.unit, e.decay), residual),
                0 if e.errors is None else e.errors.data_ptr(),
                0 if e.copy is None else e.copy.data_ptr(),
            )
        )
    scratch = encodings[0].values.new_empty(0 if kernels.on_host else 2 * cells)
    kernels.call(kernels.moments.encode_plain, made, scratch.data_ptr())


def store_sent(parts: Sequence[Sent]) -> None:
    """Store what was sent of coded values: x + before - after."""
    kernels = Kernels.find("moments", parts[0].values.device)
    made = [
        (
            *(s.values.data_ptr(), tuple(s.values.shape)),
            [
                (0, 0) if t is None else (t.data_ptr(), FORMS[t.dtype])
                for t in (s.before, s.after, s.to)
            ],
        )
        for s in parts
    ]
    kernels.call(kernels.moments.sent_plain, made)


def move(moves: Sequence[Move]) -> None:
    """Take steps: m <- g; x <- x - lr g."""
    kernels = Kernels.find("moments", moves[0].parameter.device)
    for dtype in {m.parameter.dtype for m in moves}:
        made = [
            (
                *(m.parameter.data_ptr(), rows_and_columns(m.parameter), m.gradient.data_ptr()),
                *(0 if m.momentum is None else m.momentum.data_ptr(), m.lr),
            )
            for m in moves
            if m.parameter.dtype == dtype
        ]
        kernels.call(kernels.moments.move_plain, made, core_dtype(dtype))
    written([m.parameter for m in moves])


def rows_and_columns(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the shape of the matrix that a tensor is seen as; one of one dimension is a row."""
    rows = tensor.shape[0] if tensor.ndim > 1 else 1
    return rows, tensor.numel() // max(1, rows)
