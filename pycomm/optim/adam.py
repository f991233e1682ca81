"""Parts of Adam that its relatives share: the state, steps, the denominator, and a base class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from pycomm import _C
from pycomm.codecs import Codec
from pycomm.feedback import Feedback
from pycomm.optim.base import LocalGradientOptimizer, Part
from pycomm.optim.settings import policy_of, rule_of
from pycomm.policy import Policy
from pycomm.reduction.momentum.moment import local
from pycomm.reduction.momentum.scaled import native, written
from pycomm.reduction.state import CompressionState

States = Mapping[torch.Tensor, dict[str, Any]]
"""The state of each parameter, which torch makes at the first look."""


def start(states: States, part: Part) -> None:
    """Fill the empty state of a parameter, as torch's AdamW has it."""
    state = states[part.parameter]
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(part.parameter, memory_format=torch.contiguous_format)


def step_exactly(
    states: States, parts: Sequence[Part], gradients: Mapping[str, torch.Tensor]
) -> None:
    """Take a step of torch's AdamW.

    Args:
        states: states that `start` has filled.
        parts: the parameters.
        gradients: their mean gradients, by name.
    """
    groups: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        groups[id(part.group)].append(part)
    for members in groups.values():
        step_by_adamw(
            members[0].group,
            [part.parameter for part in members],
            [gradients[p.name].view_as(p.parameter).to(p.parameter.dtype) for p in members],
            [states[part.parameter] for part in members],
        )


def step_by_adamw(
    settings: Mapping[str, Any],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Take a step of torch's AdamW with parameters of one group.

    On the CPU, float32 goes over each tensor once in C++ (csrc/optim/adamw.cpp), all tensors in one
    call; everything else by torch. A shard's values have the bits that they have in the whole.

    Args:
        settings: the group.
        parameters: the parameters, or this rank's shards.
        gradients: one for each parameter.
        states: likewise.
    """
    beta1, beta2 = settings["betas"]
    momenta = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    steps = [state["step"] for state in states]
    if all(native(*each) for each in (parameters, gradients, momenta, squares, steps)):
        _C.adamw_step(
            [
                (*(tensor.data_ptr() for tensor in tensors), tensors[0].numel())
                for tensors in zip(parameters, gradients, momenta, squares, steps, strict=True)
            ],
            *(float(settings["lr"]), float(beta1), float(beta2)),
            *(float(settings["eps"]), float(settings["weight_decay"])),
            torch.get_num_threads(),
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
        foreach=True,  # torch's fused kernel has other bits at the ends of shards
        amsgrad=False,
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(settings["lr"]),
        weight_decay=float(settings["weight_decay"]),
        eps=float(settings["eps"]),
        maximize=False,
    )


def denominator(state: Mapping[str, Any], part: Part, updates: int) -> torch.Tensor:
    """Return Adam's denominator of a second moment that was updated so many times."""
    beta2, eps = float(part.group["betas"][1]), float(part.group["eps"])
    root: torch.Tensor = state["exp_avg_sq"].sqrt()
    return root.div_((1 - beta2**updates) ** 0.5).add_(eps)


def step_by_momentum(states: States, part: Part, updates: int) -> None:
    """Take a step by the momentum in a state, which counts it.

    Args:
        states: states that `start` has filled.
        part: the parameter.
        updates: how many times its second moment was updated.
    """
    state = states[part.parameter]
    state["step"] += 1
    lr, weight_decay = float(part.group["lr"]), float(part.group["weight_decay"])
    correction = 1 - float(part.group["betas"][0]) ** float(state["step"])
    part.parameter.mul_(1 - lr * weight_decay)
    divisor = denominator(state, part, updates)
    part.parameter.addcdiv_(state["exp_avg"], divisor, value=-lr / correction)


class CodedAdam(LocalGradientOptimizer):
    """Base class of Adam's relatives whose momentum travels coded over second moments that stay.

    A subclass implements `_take`.

    Args:
        params: parameters or groups.
        settings: lr, betas, eps and weight_decay of groups.
        codec: codec of what travels, its text, or a `pycomm.Policy`.
        feedback: its feedback, of the kind residual.
        seed: seed of random rounding; equal on all ranks.
        options: model, scaler and terms; see `LocalGradientOptimizer`.

    Raises:
        ValueError: the codec or the feedback cannot be used so.
    """

    def __init__(
        self,
        params: Iterable[Any],
        settings: dict[str, Any],
        *,
        codec: str | Codec | Policy,
        feedback: str | Feedback,
        seed: int,
        **options: Any,
    ) -> None:
        who = type(self).__name__
        self._policy = policy_of(who, codec, biased=True)
        self._coding: dict[str, Any] = {"feedback": rule_of(who, feedback), "seed": seed}
        super().__init__(params, settings, **options)

    def _make_state(self) -> CompressionState:
        return CompressionState(self._policy, process_group=self.process_group, **self._coding)
