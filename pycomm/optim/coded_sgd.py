"""SGD for data-parallel models whose momentum travels coded; docs/optimizers.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.sgd import sgd

from pycomm.codecs import Codec
from pycomm.feedback import Feedback
from pycomm.momentum.moment import SGDMoment, local
from pycomm.optim.optimizer import CodedOptimizer
from pycomm.policy import Policy


class CodedSGD(CodedOptimizer):
    """SGD that exchanges its momentum, in one bit a value or one value of a hundred.

    It is `CodedAdamW` without the denominators: the momentum is coded and moves parameters as it
    is, and second moments only bound a rank's gradient.

    After a backward, the ``grad`` of a coded parameter is (1 - momentum) times torch's momentum
    buffer, a mean of gradients. A number by which it was multiplied since, as by
    `torch.nn.utils.clip_grad_norm_`, counts for the distance of this step, and not for the momentum
    that is kept. That is in the unit of torch's buffer, in the state under the same name, so a
    schedule may change `momentum`; what the last coding has left remains a part of the mean.

    Args:
        params: parameters or groups, as for `torch.optim.SGD`.
        lr: learning rate.
        momentum: from 0 to below 1. There is no dampening, and Nesterov's form is not offered,
            since no rank knows the mean gradient. The coefficient that is used is smaller: the
            codec's delay is a part of its horizon.
        weight_decay: as torch's, which comes to a share of ``lr * weight_decay / (1 - momentum)`` a
            step. Coded parameters have that at once, and their momentum is without it; with torch
            it lags behind by the momentum's horizon. In that time it hardly changes as long as
            ``lr * weight_decay`` is far below ``(1 - momentum)**2``.
        model, codec, refresh, scaler, feedback, seed: as for `CodedAdamW`.

    Raises:
        TypeError, ValueError, Error, WireMismatch: as `CodedAdamW`.

    Example:
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> optimizer = pycomm.CodedSGD(
        ...     model.parameters(), lr=0.1, momentum=0.9, model=model, codec="sign"
        ... )  # doctest: +SKIP
    """

    _moment, _torch, _exact = SGDMoment, torch.optim.SGD, ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        model: nn.Module,
        codec: str | Codec | Policy = "sign",
        refresh: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        feedback: str | Feedback = "residual",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            *(params, defaults),
            model=model,
            codec=codec,
            refresh=refresh,
            scaler=scaler,
            feedback=feedback,
            seed=seed,
        )

    def to_sgd(self, **options: Any) -> torch.optim.SGD:
        """Return torch's SGD with the same groups and momenta; this optimizer remains as it is.

        The model's gradients still travel as momentum: wrap the module in a new
        DistributedDataParallel to train with the result.

        Args:
            options: other options of `torch.optim.SGD`, such as ``fused=True``.
        """
        plain: torch.optim.SGD = self._to_torch(**options)
        return plain

    def _step_exact(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        sgd(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]
            [local(self.state[parameter]["momentum_buffer"]) for parameter in parameters],
            # None: the default of torch, which is lists on a device alone, with other bits.
            foreach=True if self.momenta.moments else None,
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            weight_decay=float(group["weight_decay"]),
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
