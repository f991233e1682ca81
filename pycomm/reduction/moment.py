"""The coded momentum of one parameter, and its second moments by rows and columns.

With g the gradient of a rank, m the momentum and d the root of the second moment, both equal on all
ranks, and e the rank's residual, a step is

    p = (b m + (1 - b) g) / d + e;  q = C(p);  e <- p - q;  m <- d mean(q)

The residual is in units of d. Eliminating it gives p <- (b + v (1 - b)) p + (1 - b) g for a codec
that leaves a share v of its input to the next step: one pole instead of the two of a residual
followed by momentum. b = (b1 - v) / (1 - v) gives it Adam's horizon.

The second moment of an n x m matrix is the outer product of its row and column sums, divided by
their total (Shazeer and Stern 2018, "Adafactor", section 3): n + m numbers, which travel exactly.
Division by d before coding makes all values of a block equally large, as they are in the update.
Sources: Tang et al. 2021, "1-bit Adam", algorithm 1, for a coded momentum with feedback.
"""

from __future__ import annotations

from typing import Any

import torch

from pycomm.codecs import Codec
from pycomm.feedback import Residual
from pycomm.policy.quality import nominal_error

EXTRA = 2  # numbers besides the sums: squares of what the last coding has left, and of its input
FLOOR = 0.1
"""Least scale of a row or column, relative to their root mean square. Rows that had no gradient
for long would otherwise dominate the block in which they are coded."""
_TINY = 1e-30
_BLOCK = 1 << 16  # values that are processed together, 256 KiB
LIMIT = 50.0
"""Most that a coordinate moves in a step, in learning rates, while second moments are some steps
old. A value that waited for hundreds of steps moves it by dozens."""


class CodedMoment:
    """The momentum of one parameter of two or more dimensions.

    It keeps what lasts in the optimizer's state: `exp_avg` [shape], `row` [rows], `column`
    [columns], `moment_weight` and `coding_error` (float32, no dimensions), equal on all ranks.

    Args:
        parameter: the parameter.
        settings: the optimizer's group: `betas` and `eps`.
        state: the optimizer's state of the parameter.
        codec: codec of the momentum.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        settings: dict[str, Any],
        state: dict[str, Any],
        codec: Codec,
    ) -> None:
        self.parameter, self.settings, self.state = parameter, settings, state
        self.rows = parameter.shape[0]
        self.columns = parameter.numel() // max(1, self.rows)
        self.sums_numel = self.rows + self.columns + EXTRA
        self.base: torch.Tensor | None = None
        """The momentum of an earlier backward to which this one adds, before the same step."""
        self.looked = False
        self._again = False
        self._error = nominal_error(codec) ** 2
        self._codec: Codec | None = codec
        self._fresh = self._zeros()  # sums of this step
        self._since = self._zeros()  # sums of the steps since the last exchange
        self._steps = 0  # steps in `_since`
        self._scale: tuple[torch.Tensor, torch.Tensor] | None = None

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.sums_numel, dtype=torch.float32, device=self.parameter.device)

    def start(self) -> None:
        """Fill an empty state."""
        parameter, state = self.parameter, self.state
        if "exp_avg" not in state:
            device = parameter.device
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state["row"] = torch.zeros(self.rows, dtype=torch.float32, device=device)
            state["column"] = torch.zeros(self.columns, dtype=torch.float32, device=device)
            state["moment_weight"] = torch.zeros((), dtype=torch.float32)
            state["coding_error"] = torch.tensor(self._error, dtype=torch.float32)

    def rebind(self, settings: dict[str, Any], state: dict[str, Any]) -> None:
        """Use another state, for example after a checkpoint was loaded."""
        self.settings, self.state = settings, state
        self._codec = None  # the error in the state belongs to the codec that comes
        self._scale = None
        self._since.zero_()
        self._steps = 0

    def factored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state for one of torch's AdamW, whose second moment is a full one."""
        squares = state["exp_avg_sq"].view(self.rows, self.columns).float()
        weight = 1 - float(self.settings["betas"][1]) ** float(state["step"])
        return {
            "step": state["step"],
            "exp_avg": state["exp_avg"].contiguous(),
            "row": squares.sum(1),
            "column": squares.sum(0),
            "moment_weight": torch.tensor(weight, dtype=torch.float32),
            "coding_error": torch.tensor(self._error, dtype=torch.float32),
        }

    def unfactored(self) -> dict[str, Any]:
        """Return a copy of the state as torch's AdamW has it."""
        state = self.state
        row, column = state["row"], state["column"]
        weight = 1 - float(self.settings["betas"][1]) ** float(state["step"])
        share = weight / max(_TINY, float(row.sum()) * float(state["moment_weight"]))
        squares = torch.outer(row * share, column)
        return {
            "step": state["step"].clone(),
            "exp_avg": state["exp_avg"].clone(),
            "exp_avg_sq": squares.view_as(self.parameter).to(self.parameter.dtype),
        }

    @property
    def beta(self) -> float:
        """The coefficient b for the horizon of betas[0], whose delay the codec takes part in."""
        beta1 = float(self.settings["betas"][0])
        error = min(0.99, float(self.state["coding_error"]))
        return max(0.0, (beta1 - error) / (1 - error))

    # ------------------------------------------------------------------ a backward

    def begin(self, *, again: bool) -> None:
        """Begin a backward; `again`: it adds to the momentum of one before the same step."""
        self.start()
        self._again = again
        if not again:
            self._fresh.zero_()
            self.base = None
        self.looked = False
        weight = float(self.state["moment_weight"])
        if weight == 0:  # `provide` is to give one, anew for every step that was not taken
            self._scale = None
        elif self._scale is None:
            row, column = self.state["row"], self.state["column"]
            self._scale = _scales(row, column, row.sum() * weight)

    @property
    def has_scale(self) -> bool:
        """Whether there is a second moment by which to divide."""
        return self._scale is not None

    def use(self, codec: Codec) -> None:
        """Set the codec of this step: another one's error is not known yet."""
        if self._codec is not None and codec != self._codec:
            self.state["coding_error"].fill_(nominal_error(codec) ** 2)
        self._codec = codec

    def enter(self, gradient: torch.Tensor, scale: float) -> None:
        """Add the gradient's squares to this step's sums.

        Args:
            gradient: this rank's gradient [numel], times `scale`; holds it without an earlier
                backward's momentum afterwards.
            scale: the loss scale.
        """
        if self._again and self.base is not None:
            gradient.sub_(self.base.reshape(-1))
        matrix = gradient.view(self.rows, self.columns)
        unit = scale**-2
        for rows in self._blocks():
            part = matrix[rows]
            norms = torch.linalg.vector_norm(part, dim=1, dtype=torch.float32)
            self._fresh[: self.rows][rows].add_(norms.square_(), alpha=unit)
            norms = torch.linalg.vector_norm(part, dim=0, dtype=torch.float32)
            self._fresh[self.rows : -EXTRA].add_(norms.square_(), alpha=unit)

    def _blocks(self) -> list[slice]:
        """Return ranges of rows that stay in a cache while several operations go over them."""
        if not self.parameter.is_cpu:
            return [slice(0, self.rows)]
        count = max(1, _BLOCK // max(1, self.columns))
        return [slice(begin, begin + count) for begin in range(0, self.rows, count)]

    def local_sums(self) -> torch.Tensor:
        """Return this rank's mean sums of the steps since the last exchange, to be averaged."""
        return (self._since + self._fresh) / (self._steps + 1)

    def provide(self, sums: torch.Tensor) -> None:
        """Take the ranks' mean of `local_sums` as the scale of the first coding."""
        row, column = sums[: self.rows], sums[self.rows : -EXTRA]
        if not sums.isfinite().all():  # this step overflows
            row, column = torch.ones_like(row), torch.ones_like(column)
        self._scale = _scales(row, column, row.sum())

    def encode(self, values: torch.Tensor, scale: float, residual: Residual | None) -> None:
        """Replace a gradient by what is coded: (b m + (1 - b) g) / d."""
        assert self._scale is not None
        row, column = self._scale
        beta = self.beta
        matrix = values.view(self.rows, self.columns)
        momentum = self.state["exp_avg"].view(self.rows, self.columns)
        by_row, by_column = row.reciprocal()[:, None], column.reciprocal()
        for rows in self._blocks():
            part = matrix[rows]
            if scale != 1:
                part.mul_(1 / scale)
            if self._again:
                part.mul_(1 - beta)
            elif beta > 0:
                part.lerp_(momentum[rows].to(part.dtype), beta)
            part.mul_(by_row[rows]).mul_(by_column)
        if residual is not None and residual.worker is not None:
            left = residual.load_worker()
            self._fresh[-2] = left.square().sum()
            self._fresh[-1] = (left + values).square().sum()

    def decode(self, values: torch.Tensor, scale: float) -> None:
        """Replace the ranks' mean by the momentum, times the loss scale."""
        assert self._scale is not None
        row, column = self._scale
        matrix = values.view(self.rows, self.columns)
        by_row = row[:, None] * scale
        for rows in self._blocks():
            matrix[rows].mul_(by_row[rows]).mul_(column)
        if self._again and self.base is not None:
            values.add_(self.base.reshape(-1))

    # ------------------------------------------------------------------ a step

    def commit(self, sums: torch.Tensor | None, *, used: bool) -> None:
        """Fold the ranks' sums into the second moment, before a step of the optimizer.

        Args:
            sums: the ranks' mean of `local_sums`; None: they were not exchanged.
            used: the parameter takes part in the step.
        """
        self.base, self.looked, self._again = None, False, False
        if not used:
            return
        self.start()
        if sums is not None and bool(sums.isfinite().all()):
            steps = self._steps + 1
            decay = float(self.settings["betas"][1]) ** steps
            state = self.state
            state["row"].mul_(decay).add_(sums[: self.rows], alpha=1 - decay)
            state["column"].mul_(decay).add_(sums[self.rows : -EXTRA], alpha=1 - decay)
            state["moment_weight"].mul_(decay).add_(1 - decay)
            left, coded = (float(x) for x in sums[-EXTRA:])
            if left > 0 and coded > 0:
                measured = min(1.0, left / coded)
                state["coding_error"].mul_(0.75).add_(0.25 * measured)
            self._since.zero_()
            self._steps = 0
            self._scale = None
        elif bool(self._fresh.isfinite().all()):
            self._since += self._fresh
            self._steps += 1

    def step(self, lr: float, weight_decay: float) -> None:
        """Move the parameter by its momentum, which is its gradient, and keep the momentum."""
        parameter, state = self.parameter, self.state
        beta1 = self.settings["betas"][0]
        assert parameter.grad is not None
        state["step"] += 1
        correction = 1 - float(beta1) ** float(state["step"])
        weight = float(state["moment_weight"])
        # eps^2 is added to every square, so that no denominator is below eps and all of them are
        # products of a row's and a column's factor (Shazeer and Stern 2018, algorithm 4).
        least = weight * max(float(self.settings["eps"]), 1e-12) ** 2
        row, column = state["row"] + least * self.columns, state["column"] + least * self.rows
        by_row = (row / (float(row.sum()) * weight)).rsqrt_()[:, None]
        by_column = column.rsqrt()
        momentum, gradient, matrix = (
            tensor.view(self.rows, self.columns)
            for tensor in (state["exp_avg"], parameter.grad, parameter)
        )
        for rows in self._blocks():
            momentum[rows].copy_(gradient[rows])
            if weight == 0:
                continue
            moved = gradient[rows].float() * by_row[rows]
            moved.mul_(by_column)
            if self._steps:  # second moments of an earlier step
                moved.clamp_(-LIMIT * correction, LIMIT * correction)
            part = matrix[rows]
            if weight_decay:
                part.mul_(1 - lr * weight_decay)
            part.add_(moved.to(part.dtype), alpha=-lr / correction)


def _scales(
    row: torch.Tensor, column: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors by row and by column whose products are the roots of the second moments."""
    parts = []
    for sums, divisor in ((row, total), (column, torch.ones_like(total))):
        root = (sums / divisor.clamp_min(_TINY)).sqrt_()
        least = FLOOR * root.square().mean().sqrt_()
        parts.append(root.clamp_min_(least.clamp_min(_TINY)))
    return parts[0], parts[1]
