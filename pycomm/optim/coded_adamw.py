"""AdamW for data-parallel models whose momentum travels coded; docs/optimizers.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from pycomm import _C
from pycomm.codecs import Codec
from pycomm.feedback import Feedback
from pycomm.momentum.moment import CodedMoment, local
from pycomm.momentum.passes import Kernels, written
from pycomm.optim.optimizer import CodedOptimizer
from pycomm.policy import Policy


class CodedAdamW(CodedOptimizer):
    """AdamW that exchanges its momentum, in one bit a value or one value of a hundred.

    Feedback on gradients and Adam's momentum are two delays in series, which training does not
    tolerate below two bits. Here the momentum itself is coded, with feedback, so there is one
    delay, and the denominators come from all ranks' gradients, by rows and columns:
    `pycomm.momentum.moment` has the formulas. Parameters of one dimension, and those that
    the policy leaves exact, are treated as torch's AdamW does.

    A rank's gradient counts at most three times its root second moment, and rows of a matrix whose
    gradients are far below the others' move less than with AdamW: docs/optimizers.md, "Long runs".

    Collective: every rank makes one, after the model is wrapped and before the first backward. It
    takes over the gradient exchange of the model, so `pycomm.compress` is not called. After a
    backward, the ``grad`` of a coded parameter is the momentum. A step takes back a number by which
    a parameter's ``grad`` was multiplied since, as `torch.nn.utils.clip_grad_norm_` does: AdamW's
    steps hardly depend on it, and a gradient that is too large is bounded before it is coded.
    Changes of single values, as by `clip_grad_value_`, are changes of the momentum.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        lr: learning rate.
        betas: of momentum and second moment. The coefficient that is used for the momentum is
            smaller than the first: the codec's delay is a part of its horizon.
        eps: added to the denominators.
        weight_decay: decoupled weight decay.
        model: the model of these parameters, in `DistributedDataParallel`, `fully_shard` or
            `replicate`.
        codec: codec of the momentum, its text ("sign", "topk:0.01", "eden:bits=1,scale=mmse",
            "int4"), or a `pycomm.Policy`. Unbiased codecs are refused.
        refresh: second moments are exchanged every so many steps; 0: so often that they take at
            most an eighth of the momentum's bytes, and every 16 steps at least.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.
        feedback: "residual" with options, such as ``storage=float32``.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        TypeError: the model is in no wrapper, or an argument has another type.
        ValueError: an option is out of range, the codec cannot be used, or a parameter does not
            belong to the model.
        Error: the model has a communication hook already, or torch's FSDP2 sums its gradients
            instead of averaging them.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> optimizer = pycomm.CodedAdamW(
        ...     model.parameters(), lr=2e-3, model=model, codec="sign"
        ... )  # doctest: +SKIP
    """

    _moment, _torch, _exact = CodedMoment, torch.optim.AdamW, ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: nn.Module,
        codec: str | Codec | Policy = "sign",
        refresh: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        feedback: str | Feedback = "residual",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            *(params, defaults),
            model=model,
            codec=codec,
            refresh=refresh,
            scaler=scaler,
            feedback=feedback,
            seed=seed,
        )

    def to_adamw(self, **options: Any) -> torch.optim.AdamW:
        """Return torch's AdamW with the same groups and state; this optimizer remains as it is.

        Second moments become full ones, of rank one. The model's gradients still travel as
        momentum: wrap the module in a new DistributedDataParallel to train with the result.

        Args:
            options: other options of `torch.optim.AdamW`, such as ``fused=True``.
        """
        plain: torch.optim.AdamW = self._to_torch(**options)
        return plain

    def _step_exact(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        step_by_adamw(
            group,
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]
            states,
            as_torch=not self.momenta.moments,
        )


def step_by_adamw(
    settings: Mapping[str, Any],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    *,
    as_torch: bool,
) -> None:
    """Take a step of torch's AdamW with parameters of one group.

    float32 goes over each tensor once, all tensors in one call: in C++ on the CPU
    (csrc/optim/moments.cpp), and by kernels with the same bits; everything else by torch. A shard's
    values have the bits that they have in the whole.

    Args:
        settings: the group.
        parameters: the parameters, or this rank's shards.
        gradients: one for each parameter.
        states: likewise.
        as_torch: with the bits of `torch.optim.AdamW` itself, where nothing is coded.
    """
    beta1, beta2 = settings["betas"]
    momenta = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    steps = [state["step"] for state in states]
    tensors = parameters, gradients, momenta, squares
    if not as_torch and _is_known(tensors, steps):
        kernels = Kernels.find(momenta[0].device)
        kernels.call(
            *(_C.adamw_step, kernels.on_host),
            [
                (*(tensor.data_ptr() for tensor in each), each[0].numel())
                for each in zip(*tensors, steps, strict=True)
            ],
            *(float(settings["lr"]), float(beta1), float(beta2)),
            *(float(settings["eps"]), float(settings["weight_decay"])),
        )
        written(parameters)
        return
    adamw(
        list(parameters),
        list(gradients),
        momenta,
        squares,
        [],
        steps,
        # Torch's fused kernel has other bits at the ends of shards. None: the default of torch.
        foreach=None if as_torch else True,
        amsgrad=False,
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(settings["lr"]),
        weight_decay=float(settings["weight_decay"]),
        eps=float(settings["eps"]),
        maximize=False,
    )


def _is_known(tensors: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor]) -> bool:
    """Return whether C++ takes these tensors, by their addresses."""
    device = tensors[0][0].device
    for one in chain(*tensors, steps):
        if one.dtype != torch.float32 or not one.is_contiguous() or one.is_neg():
            return False
    return all(one.device == device for one in chain(*tensors)) and all(one.is_cpu for one in steps)
