"""Fragments of a model, which `pycomm.LocalSGD` averages one after the other in each round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pycomm.local_sgd.outer import OuterParameters, reals


class Fragment:
    """The parameters that are averaged together, and the step of the round after which they are.

    Args:
        outer: the parameters.
        end: number of the step, from 1.
    """

    def __init__(self, outer: OuterParameters, end: int) -> None:
        self.outer, self.end = outer, end
        self.weight = 0.0
        """Samples, tokens or steps since the fragment was last sent."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state to checkpoint."""
        return {**self.outer.state_dict(), "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any], model: Mapping[str, nn.Parameter]) -> None:
        """Restore the state from `state_dict`; see `OuterParameters`."""
        self.outer.load_state_dict(state, model)
        self.weight = state["weight"]


def split(
    parameters: Mapping[str, nn.Parameter], fragments: int, every: int
) -> list[tuple[dict[str, nn.Parameter], int]]:
    """Split parameters into fragments of about equal size, in the model's order.

    Args:
        parameters: parameters by name.
        fragments: number of fragments.
        every: steps in a round, at least as many.

    Returns:
        Each fragment's parameters, and the step after which it is averaged.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if len(parameters) < fragments:
        raise ValueError(
            f"LocalSGD: exchange=Streamed(fragments={fragments}), and the model has "
            f"{len(parameters)} parameters, which are not divided"
        )
    sizes = [reals(parameter).numel() for parameter in parameters.values()]
    names, left = list(parameters), sum(sizes)
    parts, at = [], 0
    for index in range(fragments):
        first, size, others = at, 0, fragments - index - 1
        share = left / (others + 1)
        # A parameter joins if that brings the fragment nearer to its share; each gets one.
        while at < len(names) - others and (
            at == first or others == 0 or size + sizes[at] / 2 <= share
        ):
            size += sizes[at]
            at += 1
        left -= size
        part = {name: parameters[name] for name in names[first:at]}
        parts.append((part, -(-(index + 1) * every // fragments)))
    return parts
