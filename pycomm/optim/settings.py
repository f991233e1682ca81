"""What the optimizers check alike: settings, parameters, and what a loss scaler has found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.arguments import number
from pycomm.elastic.contents import plain_numbers
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.policy.names import clean
from pycomm.reduction.refusals import MOMENTA, refused

_OFF = ("amsgrad", "nesterov", "dampening", "maximize", "capturable", "differentiable")
"""Options of torch's optimizers that coded ones do not have."""


def plain(setting: Any) -> Any:
    """Return a setting; the number of a tensor with one value, which torch takes as a rate."""
    return setting.item() if isinstance(setting, torch.Tensor) and setting.numel() == 1 else setting


def check_settings(who: str, settings: dict[str, Any]) -> None:
    """Check the settings of a parameter group: lr and weight_decay, and what else there is.

    Raises:
        TypeError: one is no number.
        ValueError: one is out of its range, or an option is on that the optimizer has not.
    """
    if wrong := [name for name in _OFF if settings.get(name)]:
        option = "`nesterov`, `dampening`, `amsgrad`, `maximize`, `capturable`"
        raise ValueError(f"{who} {refused(MOMENTA, option, name=wrong[0])}")
    names = [name for name in ("lr", "eps", "weight_decay") if name in settings]
    numbers = {name: number(name, plain(settings[name])) for name in names}
    betas = settings.get("betas", (0.0, 0.0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{who}: betas={betas!r}: give two numbers")
    if not all(0 <= number("betas", beta) < 1 for beta in betas):
        raise ValueError(f"{who}: betas={betas}: each is from 0 to below 1")
    if not 0 <= number("momentum", settings.get("momentum", 0.0)) < 1:
        raise ValueError(f"{who}: momentum={settings['momentum']} must be from 0 to below 1")
    if not all(math.isfinite(x) and x >= 0 for x in numbers.values()):
        given = ", ".join(f"{name}={value}" for name, value in numbers.items())
        raise ValueError(f"{who}: {given} must be finite and at least 0")


class GroupChecks:
    """Checks of an optimizer's groups against its model, also of those that are added later.

    Args:
        who: name of the optimizer.
        module: the module in the wrapper.
        settings: names of a group's settings, which are equal on all ranks.
    """

    def __init__(self, who: str, module: nn.Module, settings: Iterable[str]) -> None:
        self._who, self._settings = who, tuple(settings)
        self.parameters = {clean(name): p for name, p in module.named_parameters()}
        """The model's parameters by name."""
        self.names = {id(p): name for name, p in self.parameters.items()}
        """Their names by id."""
        self._sparse = {
            id(part.weight): name or type(part).__name__
            for name, part in module.named_modules()
            if getattr(part, "sparse", False) and hasattr(part, "weight")
        }

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Check settings and parameters of groups; numbers of numpy become Python's.

        Raises:
            TypeError: a setting is no number.
            ValueError: a setting is out of its range, or a parameter is not the model's, has sparse
                gradients, or has another order in memory than its indices.
        """
        for group in groups:
            check_settings(self._who, group)
            group.update({key: plain_numbers(group[key]) for key in self._settings})
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise ValueError(
                        f"{self._who}: a parameter of shape {tuple(parameter.shape)} does not "
                        "belong to the model: pass the model that was wrapped, and its own "
                        "parameters; if the model has got another one since, wrap it anew, "
                        "and make the optimizer anew"
                    )
                if not parameter.is_contiguous():
                    why = refused(MOMENTA, "`channels_last`", name=self.names[id(parameter)])
                    raise ValueError(f"{self._who}: {why}")
                if id(parameter) in self._sparse:
                    why = refused(MOMENTA, "sparse gradients", name=self._sparse[id(parameter)])
                    raise ValueError(f"{self._who}: {why}")

    def terms(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """Return the settings of groups and their parameters, which are equal on all ranks."""
        settings = [{key: plain(group[key]) for key in self._settings} for group in groups]
        return [
            f"group {i} of {self._who}: {settings[i]} of "
            + ",".join(self.names[id(p)] for p in group["params"])
            for i, group in enumerate(groups)
        ]


def settings_only(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return copies of an optimizer's groups, without settings that another one has left there."""
    keys = ("params", "param_names", "initial_lr", *optimizer.defaults)
    return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]


def rule_of(who: str, feedback: str | Feedback) -> Feedback:
    """Return the feedback of a momentum.

    Raises:
        ValueError: it is of another kind than residual.
    """
    rule = Feedback.of(feedback)
    if rule is None or rule.kind != "residual":
        why = refused(MOMENTA, "feedback but `residual`", feedback=feedback)
        raise ValueError(f"{who}: {why}")
    return rule


def prepare(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    closure: Callable[[], float] | None,
) -> tuple[bool, float | None]:
    """Do what every step begins with; unscale the gradients if the scaler leaves that to us.

    Args:
        optimizer: one with `_step_supports_amp_scaling`, to which a scaler tells what it has found.
        scaler: the scaler with which it was made.
        closure: function that computes the gradients again and returns the loss.

    Returns:
        Whether to take the step, and the closure's loss.

    Raises:
        Error: a GradScaler scales the gradients, and the optimizer was made without it.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and scaler is None:
        why = refused(MOMENTA, "a GradScaler that they do not know")
        raise Error(f"rank {dist.get_rank()}: {why}")
    if found_inf is not None and float(found_inf):
        return False, loss
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        inverse = 1.0 / float(scale)
        groups = optimizer.param_groups
        grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
        torch._foreach_mul_(grads, inverse)
    return True, loss
