"""Weights of the ranks in an average: samples or tokens, exchanged while a step computes.

DDP's average is ``sum(g_i) / ranks``. With weights it is ``sum(w_i g_i) / sum(w_i)``: each rank
multiplies its contribution by ``w_i * ranks / sum(w_i)`` before it is encoded, and the division by
the number of ranks stays. So a residual is in units of the average, whatever the next step weighs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pycomm.arguments import number
from pycomm.errors import Error
from pycomm.policy.exchange import start_gather
from pycomm.reduction import own_group


class Weights:
    """The weight of this rank in each step, and those of the others.

    Collective: it makes a group of its own, so that the weights travel apart from the order of
    the model's own collectives. `set` sends a weight at once; it has come to all ranks when the
    first gradients are there, so the step waits for no round trip of its own.

    Args:
        group: the ranks that are averaged.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = own_group.make(group)
        weakref.finalize(self, own_group.close, self._group).atexit = False
        self._sent: Callable[[], list[list[float]]] | None = None

    def set(self, weight: float, device: torch.device) -> None:
        """Send this rank's weight of the next step.

        Args:
            weight: samples or tokens of the step on this rank, 0 or more.
            device: a device whose tensors the group moves.

        Raises:
            ValueError: the weight is negative, infinite or NaN; nothing was sent.
            Error: the step has a weight already; nothing was sent.
        """
        weight = checked(weight)
        if self._sent is not None:
            raise Error(
                f"rank {self._group.rank()}: this step has a weight already. With gradient "
                "accumulation give the weight of all its parts together, before the backward that "
                "reduces"
            )
        self._sent = start_gather([weight], self._group, device)

    def begin(self, device: torch.device, *, absent: bool = False) -> list[float]:
        """Return what each rank's contribution to the step that begins is multiplied by.

        Args:
            device: a device whose tensors the group moves.
            absent: this rank has no data in this step, and no weight either.

        Raises:
            Error: some rank has set no weight; raised on all ranks, before gradients are sent.
        """
        if self._sent is None:
            self._sent = start_gather([0.0 if absent else math.nan], self._group, device)
        weights = [weight for (weight,) in self._sent()]
        self._sent = None
        if missing := [str(rank) for rank, weight in enumerate(weights) if math.isnan(weight)]:
            raise Error(
                f"rank {self._group.rank()}: the average is weighted, and rank "
                f"{', '.join(missing)} has set no weight for this step: call set_weight(samples) "
                "before each backward, on every rank"
            )
        return factors(weights)


def checked(weight: float) -> float:
    """Return a weight as a float.

    Raises:
        ValueError: it is negative, infinite or NaN.
    """
    weight = float(number("weight", weight))
    if weight < 0:
        raise ValueError(f"weight={weight}: use a number of samples or tokens, which is 0 or more")
    return weight


def factors(weights: Sequence[float]) -> list[float]:
    """Return ``w_i * ranks / sum(w)`` of each rank; all zero if no rank has any weight."""
    top = max(weights)
    if top == 0:
        return [0.0] * len(weights)
    parts = [weight / top for weight in weights]  # their sum is finite
    total = math.fsum(parts)
    return [part * len(parts) / total for part in parts]


def weigh(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a contribution in place; 0 also removes what is not finite."""
    if factor == 0:
        tensor.zero_()
    elif factor != 1:
        tensor.mul_(factor)
