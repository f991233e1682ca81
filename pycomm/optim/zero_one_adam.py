"""Adam with coded momentum, second moments of ever fewer steps, and steps without exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycomm.arguments import whole
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.optim.adam import CodedAdam, denominator, start, step_by_momentum
from pycomm.optim.base import Part
from pycomm.policy import Policy


class ZeroOneAdam(CodedAdam):
    """0/1 Adam: one bit a value in some steps, none in the others.

    With a rank's gradient g, a step of a parameter whose common start was x0 is

        m <- b1 m + (1 - b1) g;  x <- x - a m / d;  u <- u + a m
        if ranks synchronize:  U = coded mean of u;  m <- U / sum of a;  x <- x0 - U / d;  u <- 0

    (Lu et al. 2022, "Maximizing communication efficiency for large-scale training via 0/1 Adam",
    arXiv 2202.06009, algorithm 1), where the coding has a residual on both sides. Adam's bias
    corrections, which the paper leaves out, are in a = lr / (1 - b1^t) and in d, the root of the
    second moment v, to which eps is added. v is updated at growing intervals by exact mean
    gradients, which are then the momentum's, too, and before the step, as in the authors'
    implementation in DeepSpeed. The interval doubles after every `variance_steps` updates, and v
    stays as it is after `freeze` steps. Until then ranks synchronize in every step; after it the
    interval doubles every `local_steps` steps, up to `most_local`.

    Between two synchronizations ranks have different parameters: look at `is_synchronized` before
    the model is evaluated or saved. A rank leaves out a step without exchange in which its own
    gradients are not finite. Weight decay is decoupled, and acts on the common start.

    Collective, and gradients as for `pycomm.DistributedLion`.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`. A group whose learning rate is 0
            takes no part in a step.
        lr: learning rate.
        betas: of momentum and second moment.
        eps: added to the denominators.
        weight_decay: decoupled weight decay.
        model: the model of these parameters, in `DistributedDataParallel`.
        freeze: number of the last step that may update second moments: the end of the learning
            rate's warm-up, at least.
        variance_steps: updates of v after which their interval doubles; the paper's kappa.
        local_steps: steps after `freeze` after which the interval of synchronizations doubles; 0:
            ranks synchronize in every step.
        most_local: longest interval of synchronizations; the paper's H.
        codec: codec of the accumulated momentum; see `pycomm.OneBitAdam`.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.
        feedback: "residual" with options, such as ``storage=float32``.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        TypeError, ValueError, Error, WireMismatch: as `pycomm.OneBitAdam`.

    Example:
        >>> optimizer = pycomm.ZeroOneAdam(
        ...     model.parameters(), lr=2e-3, model=model, freeze=1000, local_steps=5000
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
        freeze: int,
        variance_steps: int = 16,
        local_steps: int = 0,
        most_local: int = 16,
        codec: str | Codec | Policy = "sign",
        scaler: torch.amp.GradScaler | None = None,
        feedback: str | Feedback = "residual",
        seed: int = 0,
    ) -> None:
        self._freeze = whole("freeze", freeze, 1)
        self._variance_steps = whole("variance_steps", variance_steps, 1)
        self._local_steps = whole("local_steps", local_steps, 0)
        self._most_local = whole("most_local", most_local, 1)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        coding: dict[str, Any] = {"codec": codec, "feedback": feedback, "seed": seed}
        terms = [f"freeze={freeze}", f"variance_steps={variance_steps}"]
        terms += [f"local_steps={local_steps}", f"most_local={most_local}"]
        super().__init__(params, settings, model=model, scaler=scaler, terms=terms, **coding)
        for group in self.param_groups:
            group.setdefault("steps", 0)
        self._apart: dict[str, _Apart] = {}

    @property
    def steps(self) -> int:
        """Steps so far."""
        return int(self.param_groups[0]["steps"])

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not self._apart

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as `torch.optim.Optimizer` does, after a synchronization.

        Raises:
            Error: ranks have taken steps on their own since the last one.
        """
        if self._apart:
            raise Error(
                f"rank {self.process_group.rank()}: ranks have taken steps on their own since they "
                "synchronized last, and have different parameters: save when is_synchronized is "
                "true"
            )
        return super().state_dict()

    # ------------------------------------------------------------------ the schedules

    def _is_exact(self, part: Part, step: int) -> bool:
        """Return whether a parameter's second moment is updated, by an exact mean gradient.

        A parameter that joins late has the schedule of its own steps; without ranks that
        synchronize in every step, all of those travel exactly that are in the schedule's range.
        """
        own = int(self.state[part.parameter]["step"]) + 1
        if own > self._freeze:
            return False
        return step > self._freeze or self._updates_variance(own)

    def _updates_variance(self, step: int) -> bool:
        """Return whether second moments are updated in a step, counted from 1."""
        interval, count, at = 1, 0, 0
        while at < step:
            at += interval
            count += 1
            if count == self._variance_steps:
                interval, count = 2 * interval, 0
        return at == step

    def _synchronizes(self, step: int) -> bool:
        """Return whether ranks synchronize in a step, counted from 1."""
        after = step - self._freeze
        if after <= 0 or self._local_steps == 0:
            return True
        doubled = (after - 1) // self._local_steps
        interval: int = min(self._most_local, 1 << min(doubled, 62))
        return after % interval == 0

    # ------------------------------------------------------------------ a step

    def _take(self, parts: list[Part]) -> None:
        step = self.steps + 1
        parts = [part for part in parts if float(part.group["lr"]) > 0]
        for part in parts:
            start(self.state, part)
            self.state[part.parameter].setdefault(
                "updates", torch.zeros((), dtype=torch.float32, device="cpu")
            )
        exact = [part for part in parts if self._is_exact(part, step)]
        gradients = self._average({p.name: p.gradient for p in exact}) if exact else {}
        if gradients is None:
            return
        forgives = step > self._freeze and self._local_steps > 0
        apart = dict(self._apart)
        for part in parts:
            if part.name not in gradients:
                before = apart.get(part.name) or _Apart.begin(self.state[part.parameter], part)
                apart[part.name] = before.after(part, forgives=forgives)
        if self._synchronizes(step):
            sums = self._exchange({name: one.sum for name, one in apart.items()}) if apart else {}
            if sums is None:
                return
            for name, one in apart.items():
                one.synchronize(sums[name])
            apart = {}
        else:
            for name, one in apart.items():
                one.move(self._apart.get(name))
        self._apart = apart
        for part in exact:
            self._step_exactly(part, gradients[part.name])
        for group in self.param_groups:
            group["steps"] = step

    def _step_exactly(self, part: Part, gradient: torch.Tensor) -> None:
        state = self.state[part.parameter]
        beta1, beta2 = (float(beta) for beta in part.group["betas"])
        gradient = gradient.view_as(part.parameter).to(part.parameter.dtype)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["updates"] += 1
        step_by_momentum(self.state, part, int(state["updates"]))


@dataclass
class _Apart:
    """A parameter since ranks have synchronized last, on this rank."""

    part: Part
    state: dict[str, Any]
    momentum: torch.Tensor
    """m, float32 [shape]."""
    sum: torch.Tensor
    """u, float32 [shape]."""
    rates: float
    """Sum of the learning rates in u, with bias corrections."""
    keep: float
    """What weight decay has left of the common start."""
    start: torch.Tensor | None
    """The common start, once this rank has moved away from it."""
    steps: int

    @classmethod
    def begin(cls, state: dict[str, Any], part: Part) -> _Apart:
        momentum = state["exp_avg"].float()
        return cls(part, state, momentum, torch.zeros_like(momentum), 0.0, 1.0, None, 0)

    def after(self, part: Part, *, forgives: bool) -> _Apart:
        """Return this after one more step, which changes nothing yet.

        Args:
            part: the parameter with its gradient and settings.
            forgives: leave out a gradient that is not finite, of which no other rank knows.
        """
        beta1, lr = float(part.group["betas"][0]), float(part.group["lr"])
        rate = lr / (1 - beta1 ** (float(self.state["step"]) + self.steps + 1))
        keep = self.keep * (1 - lr * float(part.group["weight_decay"]))
        momentum, total = self.momentum, self.sum
        gradient = part.gradient
        if not forgives or bool(gradient.isfinite().all()):
            momentum = momentum * beta1 + gradient * (1 - beta1)
            total = total + momentum * rate
        rates, steps = self.rates + rate, self.steps + 1
        return _Apart(part, self.state, momentum, total, rates, keep, self.start, steps)

    @property
    def _divisor(self) -> torch.Tensor:
        return denominator(self.state, self.part, int(self.state["updates"]))

    def move(self, before: _Apart | None) -> None:
        """Take the step on this rank alone."""
        parameter = self.part.parameter
        if before is self:
            return  # it has no gradient in this step
        if self.start is None:
            self.start = parameter.detach().clone()
        parameter.copy_(self.start.float() * self.keep - self.sum / self._divisor)

    def synchronize(self, total: torch.Tensor) -> None:
        """Take the ranks' mean of u in the place of the own one."""
        parameter, state = self.part.parameter, self.state
        total = total.view_as(parameter)
        start = parameter if self.start is None else self.start
        state["exp_avg"].copy_(total / self.rates)
        state["step"] += self.steps
        parameter.copy_(start.float() * self.keep - total / self._divisor)
