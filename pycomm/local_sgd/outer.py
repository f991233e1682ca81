"""Fragments: the parameters that all ranks share between rounds of `pycomm.LocalSGD`.

They are kept in float32: a bfloat16 parameter cannot represent the small steps of an outer
optimizer. Its rounding must not count as a step either, so a rank's
outer gradient is the difference between the rounded start that was written to its model and the
model's values now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.tensor import DTensor

_MESSAGE = 1 << 25  # bytes that are broadcast together


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a tensor, detached; complex numbers as two reals each."""
    own: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own = own.detach()
    return torch.view_as_real(own) if own.is_complex() else own


def broadcast(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the first rank's parameters and buffers to all ranks; collective."""
    tensors = [
        reals(t) for t in (*module.parameters(), *module.buffers()) if t.layout == torch.strided
    ]
    if tensors and group.size() > 1:
        _broadcast_coalesced(group, tensors, _MESSAGE, 0)


class Fragment:
    """The common start of parameters that are averaged together, and their outer momentum.

    Args:
        parameters: parameters by name, floats or complex numbers; equal on all ranks.
        momentum: Nesterov momentum of the outer optimizer; 0: none is kept.
        end: number of the step of a round, from 1, after which they are averaged.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, momentum: float, end: int
    ) -> None:
        self.momentum, self.end = momentum, end
        self.weight = 0.0
        """Samples, tokens or steps since they were last sent."""
        self.parameters = dict(parameters)
        self.start = self.values()
        self.velocity = torch.zeros_like(self.start) if momentum else None

    def gradient(self) -> torch.Tensor:
        """Return this rank's outer gradient since the last `write`: start minus end."""
        ends = self.values()
        for (part, end), (_, begin) in zip(self._of(ends), self._of(self.start), strict=True):
            if part.dtype != begin.dtype:
                begin = begin.to(part.dtype).to(begin.dtype)  # as it was written
            torch.sub(begin, end, out=end)
        return ends

    def apply(self, gradient: torch.Tensor, lr: float) -> None:
        """Move the start by an outer gradient, which is overwritten."""
        if self.velocity is not None:
            velocity = self.velocity.mul_(self.momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.momentum)
        self.start.add_(gradient, alpha=-lr)

    @torch.no_grad()
    def write(self, values: torch.Tensor | None = None) -> None:
        """Write values to the model; None: the start, from which a round begins."""
        for part, start in self._of(self.start if values is None else values):
            part.copy_(start.view_as(part))

    @torch.no_grad()
    def mix(self, share: float) -> None:
        """Move the model to the start, but for a share of the way (Streaming DiLoCo, equation 3).

        The parameters become ``share * parameters + (1 - share) * start``.
        """
        for part, start in self._of(self.start):
            own = part.to(start.dtype).reshape(-1)
            part.copy_(torch.lerp(start, own, share).view_as(part))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state to checkpoint."""
        return {
            "names": tuple(self.parameters),
            "start": self.start.clone(),
            "velocity": None if self.velocity is None else self.velocity.clone(),
            "weight": self.weight,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that `load_state_dict` can restore a state.

        Raises:
            ValueError: the state belongs to another model, or another momentum.
        """
        if other := {*state["names"]} ^ {*self.parameters}:
            raise ValueError(
                f"LocalSGD's state and this model do not train the same parameters: only one of "
                f"them has {min(other)}"
            )
        if (state["velocity"] is None) != (self.momentum == 0):
            raise ValueError(
                "LocalSGD's state was saved with momentum or without, unlike this one: give the "
                "same momentum="
            )
        saved, here = state["start"].numel(), self.start.numel()
        if saved != here:
            raise ValueError(
                f"LocalSGD's state has {saved} values, the model {here}: it belongs to another "
                "model"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, after a `check`."""
        self.parameters = {name: self.parameters[name] for name in state["names"]}
        self.start.copy_(state["start"])
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])
        self.weight = state["weight"]

    def _of(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's part of each parameter, and its place in a flat tensor."""
        parts = list(map(reals, self.parameters.values()))
        return zip(parts, torch.split(values, [part.numel() for part in parts]), strict=True)

    def values(self) -> torch.Tensor:
        """Return this rank's parts of all parameters as a flat tensor."""
        parts = map(reals, self.parameters.values())
        return torch.cat([part.float().reshape(-1) for part in parts])


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
