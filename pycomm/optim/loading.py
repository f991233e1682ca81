"""Loading the state of an optimizer: what torch changes on the way is put right."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from pycomm.momentum.moment import FLOAT32_STATES, local


def load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load as `torch.optim.Optimizer` does, with two differences.

    Torch gives every state but ``step`` the dtype and the device of its parameter; here
    `FLOAT32_STATES` stay float32, and numbers stay on the CPU. And the optimizer keeps its groups,
    with other settings, since schedulers may hold them that were made for another optimizer
    (`pycomm.code_optimizer`).

    Args:
        optimizer: the optimizer.
        state_dict: what its `state_dict` returned.
    """
    given: dict[str, Any] = {}
    # Registered last: it sees the state as other hooks have changed it.
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
    groups = optimizer.param_groups
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        handle.remove()
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        settings = dict(loaded)
        group.clear()
        group.update(settings)
    optimizer.param_groups = groups
    numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in given["state"].get(number, {}).items():
            if key in FLOAT32_STATES:
                device = local(parameter).device if value.ndim else torch.device("cpu")
                exact = value.detach().to(device, torch.float32, copy=True)
                optimizer.state[parameter][key] = exact


def is_filling(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may be that by which torch.distributed.checkpoint makes empty states.

    It steps a new optimizer with gradients and learning rates of zero. Ranks that find this true
    have to agree, since a rank's gradients may be zero by chance.
    """
    groups = optimizer.param_groups
    return not optimizer.state and not any(float(group["lr"]) for group in groups)


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient of this rank has a value that is not zero."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return any(bool(local(grad).any()) for grad in gradients if grad is not None)
