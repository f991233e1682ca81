"""What the optimizers check alike: settings and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pycomm.arguments import number
from pycomm.elastic.contents import plain_numbers
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
            ValueError: a setting is out of its range, or a parameter is not the model's or has
                sparse gradients.
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
