"""Inner optimizers of `pycomm.LocalSGD`, whose states may have to be reset on one rank.

After one gradient that is not finite the moments of AdamW are NaN for ever, and so is each further
round of that rank. LocalSGD puts the model back to its start, and these states with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pycomm.local_sgd.outer import reals

_everybody: WeakSet[InnerOptimizers] = WeakSet()


class InnerOptimizers:
    """The optimizers that have stepped parameters of one model.

    Args:
        parameters: function that returns the model's parameters of now, by name.
    """

    def __init__(self, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        _everybody.add(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that has taken a step, if it steps a parameter of the model."""
        if optimizer in self._optimizers:
            return
        ids = set(map(id, self._parameters().values()))
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            self._optimizers.add(optimizer)

    def reset(self) -> list[str]:
        """Set the states of parameters that are not finite to zero, as those of a new optimizer.

        Returns:
            The names of these parameters.
        """
        reset = []
        for name, parameter in self._parameters().items():
            for optimizer in self._optimizers:
                values = optimizer.state.get(parameter, {}).values()
                tensors = [reals(value) for value in values if isinstance(value, torch.Tensor)]
                if not _are_finite(tensors):
                    torch._foreach_zero_(tensors)
                    reset.append(name)
        return reset


def _are_finite(tensors: Collection[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for optimizers in list(_everybody):
        optimizers.note(optimizer)


register_optimizer_step_post_hook(_note)
