"""Adam whose second moments are frozen after a warm-up, and whose momentum travels coded then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pycomm.arguments import whole
from pycomm.codecs import Codec
from pycomm.feedback import Feedback
from pycomm.optim.adam import CodedAdam, start, step_by_momentum, step_exactly
from pycomm.optim.base import Part
from pycomm.policy import Policy


class OneBitAdam(CodedAdam):
    """1-bit Adam: exact AdamW for some steps, then a coded momentum over frozen second moments.

    After `warmup` steps of a parameter its second moment v remains as it is, and

        p = b1 m + (1 - b1) g + e;  q = C(p);  e <- p - q;  m <- C(mean(q) + s) with residual s
        x <- x (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^warmup)) + eps)

    where g is a rank's gradient, and both codings have a residual (Tang et al. 2021, "1-bit Adam:
    communication efficient large-scale training with Adam's convergence speed", arXiv 2102.02888,
    algorithm 1). The warm-up is torch's AdamW but for roundings, with its bias corrections, which
    go on after it so that no step jumps; the paper has none.

    Collective, and gradients as for `pycomm.DistributedLion`.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        lr: learning rate.
        betas: of momentum and second moment.
        eps: added to the denominators.
        weight_decay: decoupled weight decay.
        model: the model of these parameters, in `DistributedDataParallel`.
        warmup: steps whose gradients travel exactly; in the paper 15 to 20 % of a training, and at
            least the warm-up of the learning rate.
        codec: codec of the momentum, its text, or a `pycomm.Policy`; PowerSGD and unbiased codecs
            are refused.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.
        feedback: "residual" with options, such as ``storage=float32``.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        TypeError: the model is not in DDP, or an argument has another type.
        ValueError: an option is out of range, the codec cannot be used, or a parameter does not
            belong to the model.
        Error: the model has a communication hook already.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> optimizer = pycomm.OneBitAdam(
        ...     model.parameters(), lr=2e-3, model=model, warmup=1000
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
        codec: str | Codec | Policy = "sign",
        scaler: torch.amp.GradScaler | None = None,
        feedback: str | Feedback = "residual",
        seed: int = 0,
    ) -> None:
        self._warmup = whole("warmup", warmup, 1)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        coding: dict[str, Any] = {"codec": codec, "feedback": feedback, "seed": seed}
        terms = [f"warmup={warmup}"]
        super().__init__(params, settings, model=model, scaler=scaler, terms=terms, **coding)

    def _take(self, parts: list[Part]) -> None:
        warming: list[Part] = []
        coded: list[Part] = []
        for part in parts:
            start(self.state, part)
            steps = float(self.state[part.parameter]["step"])
            (warming if steps < self._warmup else coded).append(part)
        gradients = self._average({p.name: p.gradient for p in warming}) if warming else {}
        if gradients is None:
            return
        momenta = self._exchange({p.name: self._momentum(p) for p in coded}) if coded else {}
        if momenta is None:
            return
        step_exactly(self.state, warming, gradients)
        for part in coded:
            state, momentum = self.state[part.parameter], momenta[part.name]
            state["exp_avg"].copy_(momentum.view_as(state["exp_avg"]))
            step_by_momentum(self.state, part, self._warmup)

    def _momentum(self, part: Part) -> torch.Tensor:
        beta1 = float(part.group["betas"][0])
        momentum: torch.Tensor = self.state[part.parameter]["exp_avg"].float()
        return momentum * beta1 + part.gradient * (1 - beta1)
