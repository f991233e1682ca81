"""AdamW whose ranks send the same few values of each parameter, so that these add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pycomm.arguments import number, typed, whole
from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.feedback.rule import EXACT
from pycomm.optim.adam import start, step_exactly
from pycomm.optim.base import LocalGradientOptimizer, Part, entered
from pycomm.optim.own_state import OwnState
from pycomm.optim.places import Places
from pycomm.policy import Policy
from pycomm.reduction.momentum import agreement, scaled
from pycomm.reduction.payloads import all_gather
from pycomm.reduction.single_coding import is_coarse

_LEAST = 2048  # values of a parameter that is masked; smaller ones are a thousandth of the bytes
_FLOOR = 1e-3  # least factor of a row or column, relative to their root mean square


class SharedMaskAdamW(LocalGradientOptimizer):
    """AdamW of which one value in a hundred moves in a step, the same ones on all ranks.

    With the gradient g of a rank and its residual e, second moments v by rows and columns that are
    equal on all ranks, and a mask M that is, too, a step is

        v <- b2 v + (1 - b2) a mean(g^2);  d = sqrt(v / (1 - b2^t)) + eps
        p = g / d + e;  q = p on M, else 0;  e <- p - q;  x <- x (1 - lr wd) - lr mean(q)

    where a is the share of the squares that belongs to the mean gradient, as
    `pycomm.reduction.momentum.agreement` measures it. A parameter is cut into chunks of at most
    4096 values, and in each step each chunk has one rank, by turns, that chooses its `density`
    largest p for all ranks. So positions travel once, whatever the number of ranks, and values
    without positions, by an all-reduce: what a rank sends and gets is bounded for any number of
    ranks. The residual takes the place of Adam's momentum: a value waits some 1 / density steps for
    its turn. While `warmup` lasts, M holds all values, and the mean gradient travels exactly.
    Parameters of one dimension, and those of less than 2048 values, are averaged exactly and move
    as with torch's AdamW.

    The idea of masks that ranks share, so that payloads add up, is that of SCAPE (Zheng et al.
    2026, arXiv 2607.01678), of which the abstract was read and no more: this is another algorithm.

    Collective, and gradients as for `pycomm.DistributedLion`.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        lr: learning rate.
        betas: of momentum and second moment; masked parameters use the second one alone.
        eps: added to the denominators.
        weight_decay: decoupled weight decay.
        model: the model of these parameters, in `DistributedDataParallel`.
        density: share of the values that a rank chooses of a chunk, at least one.
        warmup: steps in which all values move.
        values: codec of the chosen values: its text, such as "int8", "bf16" or "fp32". They have no
            feedback, so it is to be a fine one.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.

    Raises:
        TypeError: the model is not in DDP, or an argument has another type.
        ValueError: an option is out of range, or a parameter does not belong to the model.
        Error: the model has a communication hook already.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> optimizer = pycomm.SharedMaskAdamW(
        ...     model.parameters(), lr=2e-3, model=model, warmup=100
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: nn.Module,
        warmup: int,
        density: float = 0.01,
        values: str | Codec = "int8",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._density = number("density", density)
        if not 0 < self._density <= 1:
            raise ValueError(f"SharedMaskAdamW: density={density}: it is above 0 and at most 1")
        self._warmup = whole("warmup", warmup, 1)
        self._values = _fine(values)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        terms = [f"density={self._density}, warmup={warmup}, values={self._values.spec()}"]
        super().__init__(params, settings, model=model, scaler=scaler, terms=terms)

    def _make_state(self) -> OwnState:
        policy = Policy(self._values, rules=(), guard=None)
        return OwnState(policy, process_group=self.process_group, feedback=None)

    def _enter(self, name: str, parameter: torch.Tensor) -> None:
        if _is_masked(parameter):
            chosen = Places(parameter.numel(), self._density).chosen
            self.compression.add(name, entered((chosen,), parameter.device))

    # ------------------------------------------------------------------ a step

    def _take(self, parts: list[Part]) -> None:
        state = self.compression
        assert isinstance(state, OwnState)
        masked = [part for part in parts if _is_masked(part.parameter)]
        warming = [p for p in masked if self._steps_of(p) < self._warmup]
        exact = [p for p in parts if not _is_masked(p.parameter)]
        sums = {f"{p.name} squares": self._sums(p) for p in masked}
        means = self._average({p.name: p.gradient for p in exact + warming} | sums)
        if means is None:
            return
        moments = {p.name: self._moments(p, means[f"{p.name} squares"]) for p in masked}
        waiting = {
            p.name: _divided(p.gradient, *self._factors(p, moments[p.name])).add_(
                state.own.get(p.name, torch.zeros((), dtype=torch.float32, device="cpu"))
            )
            for p in masked
            if p not in warming
        }
        moved = self._exchange_chosen(waiting) if waiting else {}
        if moved is None:
            return
        # Nothing has changed before this line, so that a step that overflows leaves no trace.
        for part in warming:
            mean = means[part.name].view_as(part.parameter)
            moved[part.name] = _divided(mean, *self._factors(part, moments[part.name]))
        for part in masked:
            kept = self.state[part.parameter]
            kept["step"] = torch.tensor(
                self._steps_of(part) + 1.0, dtype=torch.float32, device="cpu"
            )
            kept |= moments[part.name]
            lr, weight_decay = float(part.group["lr"]), float(part.group["weight_decay"])
            update = moved[part.name].view_as(part.parameter)
            part.parameter.mul_(1 - lr * weight_decay)
            part.parameter.add_(update.to(part.parameter.dtype), alpha=-lr)
        for part in exact:
            start(self.state, part)
        step_exactly(self.state, exact, means)

    def _exchange_chosen(self, waiting: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
        """Average the values of a mask that ranks choose by turns; keep the others.

        Args:
            waiting: p by parameter name [shape], whose storage becomes the residual.

        Returns:
            The averages [numel], 0 outside of the mask; None: a rank's are not finite, and nothing
            has changed.
        """
        state = self.compression
        assert isinstance(state, OwnState)
        size, rank = self.process_group.size(), self.process_group.rank()
        places = {name: Places(p.numel(), self._density) for name, p in waiting.items()}
        rows = {name: places[name].rows(p) for name, p in waiting.items()}
        # The chunks of all parameters are dealt together, and to another rank in each step.
        dealt, at = {}, state.step
        for name, one in places.items():
            dealt[name] = (torch.arange(one.chunks, dtype=torch.int64, device="cpu") + at) % size
            at += one.chunks
        ours = [places[n].choose(rows[n][(d == rank).to(rows[n].device)]) for n, d in dealt.items()]
        payload = torch.cat([one.reshape(-1) for one in ours]).view(torch.uint8)
        most = [
            2 * sum(int((d == r).sum()) * places[n].each for n, d in dealt.items())
            for r in range(size)
        ]
        came = all_gather(payload, payload.numel(), most, self.process_group, variable=False)
        theirs = [part.clone().view(torch.int16) for part in came.parts()]  # clones are aligned
        masks, begins = {}, [0] * size
        for name, by in dealt.items():
            one = places[name]
            mask = theirs[0].new_empty(one.chunks, one.each)
            for r in range(size):
                count = int((by == r).sum())
                end = begins[r] + count * one.each
                mask[(by == r).to(mask.device)] = theirs[r][begins[r] : end].view(count, one.each)
                begins[r] = end
            masks[name] = mask.long()
        found = self._exchange({n: rows[n].gather(1, mask) for n, mask in masks.items()})
        if found is None:
            return None
        moved = {}
        for name, mask in masks.items():
            one = places[name]
            moved[name] = one.values(
                torch.zeros_like(rows[name]).scatter_(1, mask, found[name].view(mask.shape))
            )
            left = one.values(rows[name].scatter_(1, mask, 0.0))
            state.own[name] = left.view(waiting[name].shape).clone()
        return moved

    # ------------------------------------------------------------------ second moments

    def _steps_of(self, part: Part) -> float:
        state = self.state.get(part.parameter)
        return float(state["step"]) if state else 0.0

    def _sums(self, part: Part) -> torch.Tensor:
        """Return a gradient's squares by row and column, and how ranks can tell what they share."""
        matrix = part.gradient.reshape(part.parameter.shape[0], -1)
        rows, columns = matrix.shape
        sums = matrix.new_zeros(rows + columns + 1 + agreement.ROWS)
        scaled.add_squares(matrix, sums[:rows], sums[rows : rows + columns], 1.0)
        found = sums[-agreement.ROWS :]
        agreement.add_projections(matrix, 0, rows, int(self._steps_of(part)), found)
        sums[rows + columns] = found.dot(found)
        return sums

    def _moments(self, part: Part, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the new second moments, by row and by column and of both kinds of squares."""
        beta2 = float(part.group["betas"][1])
        rows = part.parameter.shape[0]
        row, column, (own,), found = torch.split(
            sums, [rows, sums.numel() - rows - 1 - agreement.ROWS, 1, agreement.ROWS]
        )
        of_mean = found.dot(found)
        old = self.state.get(part.parameter) or {}
        moments = {}
        for key, new in (("mean_energy", of_mean), ("own_energy", own)):
            moments[key] = beta2 * _float(old.get(key)) + (1 - beta2) * new
        energies = float(moments["mean_energy"]), float(moments["own_energy"])
        weight = (1 - beta2) * agreement.share(*energies, self.process_group.size())
        for key, new in (("row", row), ("column", column)):
            moments[key] = beta2 * _float(old.get(key)) + weight * new
        return moments

    def _factors(
        self, part: Part, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors by row and by column, whose products are the denominators."""
        beta2, eps = float(part.group["betas"][1]), float(part.group["eps"])
        weight = 1 - beta2 ** (self._steps_of(part) + 1)
        # eps^2 is added to every square, as `pycomm.reduction.momentum.moment` does.
        least = weight * max(eps, 1e-12) ** 2
        row, column = moments["row"], moments["column"]
        row, column = row + least * column.numel(), column + least * row.numel()
        return scaled.factors(row, column, weight, _FLOOR, row.numel())


def _fine(values: str | Codec) -> Codec:
    codec = parse_codec(values) if isinstance(values, str) else values
    typed("values", codec, Codec)
    if codec.combine != "recode" or (codec != EXACT and is_coarse(codec)):
        raise ValueError(
            f"SharedMaskAdamW: values={codec.spec()}: values of a mask have no feedback, so they "
            'need a codec that sends all of them finely, such as "int8", "bf16" or "fp32"'
        )
    return codec


def _is_masked(parameter: torch.Tensor) -> bool:
    return parameter.ndim > 1 and parameter.numel() >= _LEAST


def _float(value: torch.Tensor | None) -> torch.Tensor | float:
    """Return a second moment; torch casts what it loads to the parameter's type."""
    return 0.0 if value is None else value.float()


def _divided(values: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return values [shape] divided by factors of rows and columns."""
    matrix = values.reshape(row.numel(), column.numel())
    return ((matrix / row[:, None]) / column).view(values.shape)
