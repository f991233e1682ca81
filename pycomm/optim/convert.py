"""From torch's AdamW and SGD to those whose momentum travels coded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.optim.coded_adamw import CodedAdamW
from pycomm.optim.coded_sgd import CodedSGD
from pycomm.policy import Policy

_OFF = ("amsgrad", "nesterov", "dampening", "maximize", "capturable", "differentiable")


def code_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> CodedAdamW | CodedSGD:
    """Return a `CodedAdamW` or `CodedSGD` with the groups and the state of torch's; collective.

    The state is equal on all ranks, as DDP keeps it. The old optimizer remains as it is, and is not
    used any more; schedulers are made for the new one.

    Args:
        optimizer: a `torch.optim.AdamW`, or a `torch.optim.SGD` with momentum, new or in the middle
            of training.
        model: the DDP model of its parameters.
        codec: codec of the momentum; see `CodedAdamW`, whose errors it raises.
        options: other options of `CodedAdamW` or `CodedSGD`.

    Raises:
        TypeError: the optimizer is neither.
        ValueError: it has an option that the new one has not, or no momentum.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # doctest: +SKIP
        >>> optimizer = pycomm.code_optimizer(optimizer, model, "sign")  # doctest: +SKIP
    """
    typed("optimizer", optimizer, torch.optim.Optimizer)
    coded: CodedAdamW | CodedSGD
    if isinstance(optimizer, torch.optim.AdamW):
        groups = _groups(optimizer, "CodedAdamW", ("betas", "eps"))
        coded = CodedAdamW(groups, model=model, codec=codec, **options)
        coded.take_state(optimizer)
        return coded
    if isinstance(optimizer, torch.optim.SGD):
        groups = _groups(optimizer, "CodedSGD", ("momentum",))
        if not all(group["momentum"] for group in groups):
            raise ValueError(
                "code_optimizer: the SGD has no momentum that could travel: compress its "
                "gradients, pycomm.compress(model, ...)"
            )
        coded = CodedSGD(groups, model=model, codec=codec, **options)
        coded.take_state(optimizer)
        return coded
    raise TypeError(
        f"code_optimizer takes torch.optim.AdamW or SGD, not {type(optimizer).__name__}: compress "
        "the gradients of another optimizer, pycomm.compress(model, ...)"
    )


def _groups(
    optimizer: torch.optim.Optimizer, who: str, settings: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the settings that `who` takes."""
    for group in optimizer.param_groups:
        if wrong := [name for name in _OFF if group.get(name)]:
            raise ValueError(f"code_optimizer: {who} has no {wrong[0]}: turn it off")
    keys = ("params", "lr", "weight_decay", "initial_lr", *settings)
    return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]
