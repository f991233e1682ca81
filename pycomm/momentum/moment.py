"""The coded momentum of one parameter, and its second moments by rows and columns.

With g the gradient of a rank, o what it has sent of the momentum, e its residual, and m the
momentum and d the root of the second moment, both equal on all ranks, a step is

    p = (b o + (1 - b) g) / d + e;  q = C(p);  e <- p - q;  o <- d q;  m <- d mean(q)

The mean of o over the ranks is m. The residual is in units of d. Eliminating it gives
p <- (b + v (1 - b)) p + (1 - b) g for a codec that leaves a share v of its input to the next step:
one pole instead of the two of a residual followed by momentum. b = (b1 - v) / (1 - v) gives it
Adam's horizon.

The second moment is that of the mean gradient, as Adam's: the ranks' own squares, which have more
noise, times the share of them that `pycomm.momentum.agreement` measures. Of an n x m
matrix it is the outer product of its row and column sums, divided by their total (Shazeer and Stern
2018, "Adafactor", section 3): n + m numbers, which travel exactly. Division by d before coding
makes all values of a block equally large, as they are in the update.

A factor of d has a floor, relative to the root mean square of all, where the gradient is divided as
where the parameter moves: what the coding of a row errs by would else be multiplied by their
quotient in the update. It is a tenth for a row or column without a gradient for long, whose second
moment has decayed, and which would dominate the block in which it is coded: with a smaller one,
coding errors of such rows moved an embedding by 50 learning rates a step, and a run of 2,000 steps
diverged. One that is small in all steps, as that of a feature in small units, is no such row or
column, and its floor falls to a thousandth (`scaled.Heard`); gradients that are not 0 are no sign
of it, since an output for a rare word has small ones in all steps, and a large one now and then.
A rank's gradient counts at most `BOUND` times its root second moment.
Sources: Tang et al. 2021, "1-bit Adam", algorithm 1, for a coded momentum with feedback.

Ranks may share the parameter by rows (FSDP2). Its sums are then those of the whole parameter, on
all ranks, and the momentum in the optimizer's state is that of the own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pycomm.codecs import Codec
from pycomm.feedback import Residual
from pycomm.momentum import agreement, scaled
from pycomm.policy.quality import nominal_error

EXTRA = 3 + agreement.ROWS
"""Numbers besides the sums: squares of what the last coding has left, of its input, of this rank's
projections, and these projections, whose mean over the ranks makes place for its squares."""
BOUND = 3.0
"""Most that a rank's gradient counts in a step, as a multiple of its root second moment, over all
values of a matrix. Second moments are known after the coding, up to some steps later: without a
bound, one gradient that is a hundred times too large moves all values by dozens of learning rates,
and stays in the momentum. Adam divides it by a root that it has enlarged itself."""
FLOAT32_STATES = (
    *("row", "column", "heard"),
    *("moment_weight", "coding_error", "mean_energy", "own_energy"),
)
"""States that are float32 whatever the parameter is. Those without dimensions are on the CPU; where
`on_device` has the passes, on the device."""
_TINY = 1e-30
_STEPS = 1024  # of b, from 0 to 1
LIMIT = 50.0
"""Most that a coordinate moves in a step, in learning rates, while second moments are some steps
old. A value that waited for hundreds of steps moves it by dozens."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or of a DTensor the shard of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shortened(momentum: float, error: float) -> float:
    """Return the coefficient b of a coded momentum that has the horizon of an exact one.

    It is rounded down, so that the order in which errors were added up does not matter.

    Args:
        momentum: coefficient of the exact momentum, from 0 to below 1.
        error: share of its squares that the coding leaves to the next step.
    """
    if error == 0:
        return momentum
    error = min(0.99, error)
    return max(0.0, math.floor(_STEPS * (momentum - error) / (1 - error)) / _STEPS)


def _decayed(state: torch.Tensor, decay: float, new: float) -> float:
    """Move a number of the state by a share of 1 - decay to a new one, and return it."""
    # One operation of torch instead of two, which for numbers cost more than for small matrices.
    return float(state.fill_(decay * state.item() + (1 - decay) * new))


class CodedMoment:
    """The momentum of one parameter of two or more dimensions.

    It keeps what lasts in the optimizer's state: `exp_avg` [shape], sharded like the parameter, and
    `row` [rows], `column` [columns], `heard` [2, rows + columns] (`scaled.Heard`), `moment_weight`
    and `coding_error` (float32, no dimensions), equal on all ranks.

    Args:
        parameter: the parameter; a DTensor's shards are rows, equally many on all ranks but the
            last ones.
        settings: the optimizer's group: `betas` and `eps`.
        state: the optimizer's state of the parameter.
        codec: codec of the momentum.
        shard: number of this rank's shard.
        shards: number of shards; 1: each rank has the whole parameter.
        ranks: number of ranks that average their momenta.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        settings: dict[str, Any],
        state: dict[str, Any],
        codec: Codec,
        *,
        shard: int = 0,
        shards: int = 1,
        ranks: int = 1,
    ) -> None:
        self.parameter, self.settings, self.state = parameter, settings, state
        self.rows = parameter.shape[0]
        self.columns = parameter.numel() // max(1, self.rows)
        self.sums_numel = self.rows + self.columns + EXTRA
        self.padded = -(-self.rows // shards)
        """Rows of a shard, with padding."""
        self._shards, self._shard, self._ranks = shards, shard, ranks
        begin = min(self.rows, shard * self.padded)
        self._own = slice(begin, min(self.rows, begin + self.padded))
        self.probe: scaled.Probe | None = None
        """Of the momentum that this backward has left in the gradient."""
        self._error = nominal_error(codec) ** 2
        self.codec: Codec | None = codec
        """That of now; None: a state was loaded, whose error belongs to the one that comes."""
        self._fresh = self._zeros()  # sums of this step
        self._of_step = self._fresh[: self.rows], self._fresh[self.rows : -EXTRA]
        self._since = self._zeros()  # sums of the steps since the last exchange
        self._steps = 0  # steps in `_since`
        self._decay = 1.0  # of second moments in these steps and this one
        self._scale: tuple[torch.Tensor, torch.Tensor] | None = None
        self._no_factors: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums: scaled.Sums | None = None
        """The second moments of now."""
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None  # for the following
        self._reciprocals: tuple[float, torch.Tensor, torch.Tensor] | None = None
        """Of the second moments of now: eps, and the denominators' reciprocal factors."""

    def _zeros(self) -> torch.Tensor:
        device = local(self.parameter).device
        return torch.zeros(self.sums_numel, dtype=torch.float32, device=device)

    def start(self) -> None:
        """Fill an empty state."""
        if "exp_avg" not in self.state:
            parameter, step = self.parameter, torch.zeros((), dtype=torch.float32, device="cpu")
            momentum = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            self.state.update(self._begun(step, momentum, self._zeros(), 0.0))
        elif "heard" not in self.state:  # of a version that had one floor for all
            self.state["heard"] = self._unheard()

    def _unheard(self) -> torch.Tensor:
        return self._zeros()[:-EXTRA].repeat(2, 1)

    def _begun(
        self, step: torch.Tensor, momentum: torch.Tensor, sums: torch.Tensor, weight: float
    ) -> dict[str, Any]:
        """Return a state without a coding so far."""
        numbers = {"moment_weight": weight, "coding_error": self._error}
        numbers |= {"mean_energy": 0.0, "own_energy": 0.0}
        return {
            "step": step,
            "exp_avg": momentum,
            "row": sums[: self.rows].clone(),
            "column": sums[self.rows : -EXTRA].clone(),
            "heard": self._unheard(),
            **{
                name: torch.tensor(number, dtype=torch.float32, device="cpu")
                for name, number in numbers.items()
            },
        }

    def rebind(self, settings: dict[str, Any], state: dict[str, Any]) -> None:
        """Use another state, for example after a checkpoint was loaded."""
        self.settings, self.state = settings, state
        self.codec = None
        self._scale = self._reciprocals = self._sums = self.probe = None
        self._since.zero_()
        self._steps, self._decay = 0, 1.0

    def squares_of(self, state: dict[str, Any]) -> torch.Tensor:
        """Return the sums of a full second moment of torch's AdamW: of the own rows, and zeros."""
        sums = self._zeros()
        squares = local(state["exp_avg_sq"]).reshape(-1, self.columns).float()
        sums[: self.rows][self._own] = squares.sum(1)
        sums[self.rows : -EXTRA] = squares.sum(0)
        return sums

    def factored(self, state: dict[str, Any], sums: torch.Tensor) -> dict[str, Any]:
        """Return the state for one of torch's AdamW, whose second moment is a full one.

        Args:
            state: that of torch's AdamW.
            sums: the total of `squares_of` over the shards.
        """
        weight = 1 - float(self.settings["betas"][1]) ** float(state["step"])
        return self._begun(state["step"], state["exp_avg"].contiguous(), sums, weight)

    def unfactored(self) -> dict[str, Any]:
        """Return a copy of the state as torch's AdamW has it."""
        state = self.state
        row, column = state["row"][self._own], state["column"]
        weight = 1 - float(self.settings["betas"][1]) ** float(state["step"])
        share = weight / max(_TINY, float(column.sum()) * float(state["moment_weight"]))
        squares = torch.zeros_like(self.parameter)
        local(squares).copy_(torch.outer(row * share, column).view_as(local(squares)))
        return {
            "step": state["step"].clone(),
            "exp_avg": state["exp_avg"].clone(),
            "exp_avg_sq": squares,
        }

    @property
    def beta(self) -> float:
        """The coefficient b for the horizon of betas[0], whose delay the codec takes part in."""
        return shortened(float(self.settings["betas"][0]), float(self.state["coding_error"]))

    # ------------------------------------------------------------------ a backward

    def begin(self) -> None:
        """Begin a backward."""
        self.start()
        self._fresh.zero_()
        self.probe = None
        weight = float(self.state["moment_weight"])
        if weight == 0:  # `provide` is to give one, anew for every step that was not taken
            self._scale = None
        elif self._scale is None:
            self._scale = self._scales(self._second(weight))

    @property
    def has_scale(self) -> bool:
        """Whether there is a second moment by which to divide."""
        return self._scale is not None

    def use(self, codec: Codec) -> None:
        """Set the codec of this step: another one's error is not known yet."""
        if self.codec is not None and codec != self.codec:
            self.state["coding_error"].fill_(nominal_error(codec) ** 2)
        self.codec = codec

    def enter(self, gradient: torch.Tensor, scale: float, shard: int | None = None) -> None:
        """Add the gradient's squares to this step's sums.

        Args:
            gradient: this rank's gradient [numel], times `scale`. Of a shard, with padding.
            scale: the loss scale.
            shard: number of the shard; None: the own one.
        """
        rows = self._rows_of(shard)
        matrix = gradient.view(self.padded, self.columns)[: rows.stop - rows.start]
        sums = self._sums_of(rows)
        scaled.encode([scaled.Encoding(matrix, len(matrix), sums=sums, unit=1 / scale)])

    def _sums_of(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        row, column = self._of_step
        return (row if self._shards == 1 else row[rows]), column

    def _rows_of(self, shard: int | None) -> slice:
        if shard is None:
            return self._own
        begin = min(self.rows, shard * self.padded)
        return slice(begin, min(self.rows, begin + self.padded))

    def local_sums(self) -> torch.Tensor:
        """Return this rank's mean sums of the steps since the last exchange, to be averaged.

        `SumPlaces.measure` adds the squares of projections, of all moments at once.
        """
        projections = self._fresh[-agreement.ROWS :]  # those of this step alone
        if self._steps:
            sums = (self._since + self._fresh).div_(self._steps + 1)
            sums[-agreement.ROWS :] = projections
        else:
            sums = self._fresh.clone()
        return sums

    def provide(self, sums: torch.Tensor) -> None:
        """Take the ranks' mean of `local_sums` as the scale of the first coding."""
        row, column = sums[: self.rows], sums[self.rows : -EXTRA]
        if not sums.isfinite().all():  # this step overflows
            row = torch.full_like(row, self.columns)
            column = torch.full_like(column, self.rows)
        self._scale = self._scales(scaled.Sums(row, column))

    def _second(self, weight: float) -> scaled.Sums:
        """Return the second moments, with their weight."""
        if self._sums is None:
            state = self.state
            by_row, by_column = torch.split(state["heard"], [self.rows, self.columns], dim=1)
            row_heard, column_heard = (by_row[0], by_row[1]), (by_column[0], by_column[1])
            sums = state["row"], state["column"], weight
            self._sums = scaled.Sums(*sums, row_heard, column_heard)
        return self._sums

    def _scales(self, sums: scaled.Sums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors by row and by column whose products are the roots of the second moments.

        The rows' are those of all shards, with padding.
        """
        return scaled.factors(sums, self._shards * self.padded)

    def _scale_of(self, shard: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._scale is not None
        if self._shards == 1:
            return self._scale
        begin = (self._shard if shard is None else shard) * self.padded
        return self._scale[0][begin : begin + self.padded], self._scale[1]

    def encoding(
        self,
        values: torch.Tensor,
        scale: float,
        residual: Residual | None,
        momentum: torch.Tensor | None = None,
        shard: int | None = None,
        *,
        entered: bool = False,
        looks: bool = True,
        divides: bool = True,
    ) -> scaled.Encoding:
        """Return what replaces a gradient by what is coded: (b o + (1 - b) g) / d.

        A gradient above `BOUND` root second moments is scaled down to that, and is so nowhere else:
        its squares are added as they are.

        Args:
            values: the gradient, as for `enter`.
            scale: the loss scale.
            residual: what is added by the coding.
            momentum: o [numel], as residuals are stored; None: m, that of the optimizer's state.
            shard: number of the shard; None: the own one.
            entered: `enter` was called for it; else this does the same.
            looks: measure the errors of the coding before.
            divides: False: leave out the division by d, for one rank that codes nothing.
        """
        rows = self._rows_of(shard)
        row, column = self._scale_of(shard) if divides else self._ones()
        made = scaled.Encoding(
            values.view(self.padded, self.columns),
            *(rows.stop - rows.start, row, column),
            beta=self.beta,
            unit=1 / scale,
        )
        if made.beta > 0:
            made.momentum = local(self.state["exp_avg"]) if momentum is None else momentum
            made.known = made.real
        if not entered:
            made.sums, made.bound = self._sums_of(rows), self._bound(rows)
        if looks:
            step, numbers = int(self.state["step"]), self._fresh[-agreement.ROWS :]
            first, stride, at = agreement.turn(rows.start, self.rows, step)
            signs = agreement.signs_of(self.columns, step, values.device)
            made.projections = signs, first, stride, numbers[at:]
            if residual is not None and residual.worker is not None:
                made.residual = residual.stored_worker(shard or 0)
                made.errors = self._fresh[-EXTRA:]
        return made

    def _bound(self, rows: slice) -> tuple[torch.Tensor, float] | None:
        """Return what bounds the squares of this rank's gradient in some rows."""
        state = self.state
        weight = float(state["moment_weight"])
        if weight == 0:
            return None
        energies = float(state["mean_energy"]), float(state["own_energy"])
        own = weight * agreement.share(*energies, self._ranks)
        return state["row"][rows], BOUND**2 / own

    def _ones(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors that change nothing."""
        if self._no_factors is None:
            column = torch.ones_like(self.state["column"])
            self._no_factors = column.new_ones(self.padded), column
        return self._no_factors

    def landing(self, values: torch.Tensor, *, divides: bool = True) -> scaled.Matrix:
        """Return what makes the ranks' mean, of the own shard, a momentum; see `scaled.land`.

        Args:
            values: the mean.
            divides: it was divided by d; see `encoding`.
        """
        matrix = values.view(self.padded, self.columns)
        return (matrix, *self._scale_of(None)) if divides else (matrix, None, None)

    def land(self, probe: scaled.Probe) -> None:
        """Take note of the probe of a momentum that `scaled.land` has made."""
        real = (self._own.stop - self._own.start) * self.columns  # what is behind has no gradient
        if real < self.padded * self.columns:
            probe.values = probe.values * (probe.places.amax() < real)
        self.probe = probe

    def sent(
        self,
        coded: torch.Tensor,
        residual: Residual | None,
        own: Residual,
        shard: int | None,
        before: torch.Tensor | None = None,
    ) -> scaled.Sent:
        """Return what stores what this rank has contributed to a shard's momentum.

        Args:
            coded: what `encoding` has made of the shard's gradient.
            residual: that of the coding, which is complete.
            own: where it is stored.
            shard: number of the shard; None: the own one.
            before: a copy of the residual before the coding, if that has overwritten it.
        """
        row, column = self._scale_of(shard)
        place, after = shard or 0, None
        if residual is not None and residual.worker is not None:
            before = residual.stored_worker(place) if before is None else before
            after = residual.fresh_worker(place)
        values, to = coded.view(self.padded, self.columns), own.fresh_worker(place)
        return scaled.Sent(values, row, column, before, after, to)

    # ------------------------------------------------------------------ a step

    def commit(
        self, sums: torch.Tensor | None, numbers: Sequence[float] = (), *, used: bool
    ) -> bool:
        """Fold the ranks' sums into the second moment, before a step of the optimizer.

        Args:
            sums: the ranks' mean of `local_sums`; None: they were not exchanged, or are not finite.
            numbers: those that `SumPlaces.split` found in them.
            used: the parameter takes part in the step.

        Returns:
            Whether this step's sums wait for the next exchange: `wait` is to be called.
        """
        if not used:
            return False
        self.start()
        self._decay *= float(self.settings["betas"][1])  # a schedule may change it
        if sums is not None:
            decay, state = self._decay, self.state
            left, coded, own, of_mean, _ = numbers
            energies = (
                _decayed(state["mean_energy"], decay, of_mean),
                _decayed(state["own_energy"], decay, own),
            )
            _decayed(state["moment_weight"], decay, 1.0)
            weight = (1 - decay) * agreement.share(*energies, self._ranks)
            scaled.fold(self._second(1.0), sums, decay, weight, self._steps + 1)
            self._sums = None
            if left > 0 and coded > 0:
                _decayed(state["coding_error"], 0.75, min(1.0, left / coded))
            self._since.zero_()
            self._steps, self._decay = 0, 1.0
            self._scale = self._reciprocals = None
            return False
        return True

    def step(self, lr: float, weight_decay: float) -> scaled.Move | None:
        """Count a step, and return how the parameter moves by its momentum, which is its gradient.

        None: the momentum is kept, and the parameter stays.
        """
        state = self.state
        beta1 = self.settings["betas"][0]
        assert self.parameter.grad is not None
        steps = state["step"].item() + 1
        state["step"].fill_(steps)
        correction = 1 - float(beta1) ** steps
        weight = state["moment_weight"].item()
        gradient, momentum = local(self.parameter.grad).contiguous(), local(state["exp_avg"])
        if weight == 0:
            momentum.copy_(gradient)
            return None
        by_row, by_column = self._reciprocals_for(float(self.settings["eps"]), weight)
        return scaled.Move(
            # A copy of a parameter in another memory format.
            local(self.parameter).contiguous(),
            *(gradient, momentum, by_row, by_column),
            lr=lr / correction,
            keep=1 - lr * weight_decay,
            # Second moments of an earlier step.
            limit=LIMIT * correction if self._steps else 0.0,
            probe=self.probe,
        )

    @staticmethod
    def move(moments: Sequence[CodedMoment], lr: float, weight_decay: float) -> None:
        """Move parameters by their momenta, which are their gradients, and keep the momenta."""
        made = [(moment, moment.step(lr, weight_decay)) for moment in moments]
        moves = [(local(moment.parameter), one) for moment, one in made if one is not None]
        scaled.move([one for _, one in moves])
        for values, one in moves:
            if one.parameter is not values:
                values.copy_(one.parameter)

    def _reciprocals_for(self, eps: float, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reciprocals of the denominators' factors, of the own rows and the columns."""
        if self._reciprocals is None or self._reciprocals[0] != eps:
            # eps^2 is added to every square, so that no denominator is below eps and all of them
            # are products of a row's and a column's factor (Shazeer and Stern 2018, algorithm 4).
            least = weight * max(eps, 1e-12) ** 2
            sums = self._second(weight)
            if self._shards > 1:
                assert sums.row_heard is not None
                own = [sums.row[self._own], *(one[self._own] for one in sums.row_heard)]
                sums = scaled.Sums(own[0], sums.column, weight, (own[1], own[2]), sums.column_heard)
            self._room = scaled.reciprocal_factors(sums, self.rows, least, out=self._room)
            self._reciprocals = (eps, *self._room)
        return self._reciprocals[1:]

    @staticmethod
    def wait(moments: Sequence[CodedMoment]) -> None:
        """Add this step's sums to those since the last exchange, where they are finite.

        All ranks count the step, also a rank whose squares overflow and are left out: the ranks'
        number of steps decides how far second moments decay and values move.
        """
        if not moments:
            return
        largest = torch._foreach_norm([moment._fresh for moment in moments], math.inf)
        device = largest[0].device
        finite = torch.stack([one.to(device) for one in largest]).isfinite().tolist()
        chosen = [moment for moment, one in zip(moments, finite, strict=True) if one]
        if chosen:
            torch._foreach_add_([m._since for m in chosen], [m._fresh for m in chosen])
        for moment in moments:
            moment._steps += 1
