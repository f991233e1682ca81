"""From torch's AdamW to one whose momentum travels coded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.optim.coded_adamw import CodedAdamW
from pycomm.policy import Policy

_OFF = ("amsgrad", "maximize", "capturable", "differentiable")


def code_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> CodedAdamW:
    """Return a `CodedAdamW` with the groups and the state of torch's AdamW; collective.

    The state is equal on all ranks, as DDP keeps it. The old optimizer remains as it is, and is not
    used any more; schedulers are made for the new one.

    Args:
        optimizer: a `torch.optim.AdamW`, new or in the middle of training.
        model: the DDP model of its parameters.
        codec: codec of the momentum; see `CodedAdamW`, whose errors it raises.
        options: other options of `CodedAdamW`.

    Raises:
        TypeError: the optimizer is not AdamW.
        ValueError: it has an option that `CodedAdamW` has not.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # doctest: +SKIP
        >>> optimizer = pycomm.code_optimizer(optimizer, model, "sign")  # doctest: +SKIP
    """
    typed("optimizer", optimizer, torch.optim.Optimizer)
    if not isinstance(optimizer, torch.optim.AdamW):
        raise TypeError(
            f"code_optimizer takes torch.optim.AdamW, not {type(optimizer).__name__}: compress the "
            "gradients of another optimizer, pycomm.compress(model, ...)"
        )
    for group in optimizer.param_groups:
        if wrong := [name for name in _OFF if group.get(name)]:
            raise ValueError(f"code_optimizer: CodedAdamW has no {wrong[0]}: turn it off")
    keys = ("params", "lr", "betas", "eps", "weight_decay", "initial_lr")
    groups = [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]
    coded = CodedAdamW(groups, model=model, codec=codec, **options)
    coded.take_state(optimizer)
    return coded
