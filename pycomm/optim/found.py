"""The optimizers that a script makes, and the model's among them; for `pycomm.run --optimizer`."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import nn

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks.construction import after_construction
from pycomm.optim.convert import code_in_place, put_into_wrapper
from pycomm.policy import Policy

_made: dict[str, list[weakref.ref[Any]]] = {"optimizer": [], "scaler": [], "wrapper": []}


@cache
def watch() -> None:
    """Note the optimizers, GradScalers and wrappers of Accelerate that are made from now on."""
    for module, name, role in (
        ("torch.optim.optimizer", "Optimizer", "optimizer"),
        ("torch.amp.grad_scaler", "GradScaler", "scaler"),
        ("accelerate.optimizer", "AcceleratedOptimizer", "wrapper"),
    ):
        noted = _made[role]
        after_construction(module, name, lambda made, noted=noted: noted.append(weakref.ref(made)))  # type: ignore[misc]


def _living(role: str) -> list[Any]:
    """Return what lives of a role, in the order in which it was made."""
    _made[role][:] = [ref for ref in _made[role] if ref() is not None]
    return [made for ref in _made[role] if (made := ref()) is not None]


def code_optimizer_of(model: nn.Module, codec: Codec | Policy, **options: Any) -> None:
    """Let the optimizer of a model's parameters exchange coded momentum; collective.

    Of several the one with the most values is taken; gradients of the others travel exactly.

    Args:
        model: a model in DDP or `fully_shard`, before its first backward.
        codec, options: as for `code_optimizer`, whose errors this raises, too.

    Raises:
        Error: no optimizer, or more than one GradScaler.
    """
    parameters = {id(parameter) for parameter in model.parameters()}

    def size(optimizer: torch.optim.Optimizer) -> int:
        held = (p for group in optimizer.param_groups for p in group["params"])
        return sum(p.numel() for p in held if id(p) in parameters)

    found = [
        one
        for one in _living("optimizer")
        if not getattr(one.step, "replaced", False) and size(one)
    ]
    if not found:
        raise Error(
            "no optimizer of torch has the model's parameters when its first forward begins: make "
            "it before, or use --codec"
        )
    optimizer = max(found, key=size)
    scalers = [scaler for scaler in _living("scaler") if scaler.is_enabled()]
    if len(scalers) > 1:
        raise Error(
            f"the script has {len(scalers)} GradScalers, and the momentum has the unit of one: use "
            "pycomm.code_optimizer(optimizer, model, scaler=...) in the script"
        )
    code_in_place(optimizer, model, codec, scaler=scalers[0] if scalers else None, **options)
    for wrapper in _living("wrapper"):
        if wrapper.optimizer is optimizer:
            put_into_wrapper(wrapper, optimizer)
