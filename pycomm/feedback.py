"""Error feedback as state beside the model: what each parameter's payloads still owe.

A residual belongs to a parameter's name, not to a bucket: DDP makes new buckets after its first
step. There are two per parameter. The worker residual is the error of what this rank contributed;
the owner residual is the error of what this rank sent back for the values that it owns
(Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", section 4; for both sides Tang et al.
2019, "DoubleSqueeze", algorithm 1).

Each is a pair of buffers: a step reads side `side` and writes the other. `commit` makes the written
side the current one; without it the step has left no trace, which is what a step that overflowed
needs. Memory: 8 bytes per value for the worker's pair, and 8 / world_size for the owner's.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

_SLICE = 1 << 15  # values: a few pages, and too little for torch to wake its threads


@dataclass
class Residual:
    """What one parameter owes. All buffers are float32 [numel]."""

    worker: Pair
    owner: Pair
    """Zero but for the values that this rank owns; zero pages that nobody writes cost nothing."""
    layout: str
    """Names the bucket under which `owner` was written, since the bucket decides who owns what."""


class Feedback:
    """The residuals of one model on one rank, by parameter name.

    Args:
        world_size: number of ranks, by which owners divide.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.side = 0
        self._residuals: dict[str, Residual] = {}

    def residual(self, name: str, numel: int, device: torch.device) -> Residual:
        """Return the residual of a parameter; zeros at first.

        Raises:
            ValueError: the parameter had another size before.
        """
        found = self._residuals.get(name)
        if found is None:
            found = _zeros(numel, device)
            self._residuals[name] = found
        if found.worker[0].numel() != numel:
            raise ValueError(
                f"feedback: {name} has {numel} values, its residual {found.worker[0].numel()}; "
                "the state belongs to another model"
            )
        return found

    def __contains__(self, name: str) -> bool:
        """Whether a parameter has a residual."""
        return name in self._residuals

    def owed(self, name: str, begin: int, end: int) -> torch.Tensor | None:
        """Return what this rank's residuals of values begin <= i < end add to the average.

        A worker's error counts 1/world_size, an owner's once. float32 [end - begin]; None: nothing.
        """
        found = self._residuals.get(name)
        if found is None:
            return None
        worker, owner = found.worker[self.side], found.owner[self.side]
        return worker[begin:end] / self.world_size + owner[begin:end]

    def use(self, residual: Residual, layout: str) -> None:
        """Tell that the owners of a parameter's values are those of `layout` from now on.

        If they change, what this rank owes as an owner becomes part of what it owes as a worker. An
        owner's error counts once in the average and a worker's 1/world_size, so nothing is lost.
        """
        if residual.layout == layout:
            return
        if residual.layout:
            self._fold(residual)
        residual.layout = layout

    def _fold(self, residual: Residual) -> None:
        """Add the owner residual to the worker's, leaving alone pages that were never written."""
        worker, owner = residual.worker[self.side], residual.owner[self.side]
        other = residual.owner[1 - self.side]
        for start in range(0, worker.numel(), _SLICE):
            part = slice(start, start + _SLICE)
            if owner[part].any():
                worker[part].add_(owner[part], alpha=self.world_size)
                owner[part].zero_()
            if other[part].any():
                other[part].zero_()

    def commit(self, names: Iterable[str]) -> None:
        """Keep what the last step has written. `names` are the parameters that took part."""
        for name in self._residuals.keys() - set(names):
            for pair in (self._residuals[name].worker, self._residuals[name].owner):
                pair[1 - self.side].copy_(pair[self.side])
        self.side = 1 - self.side

    def norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual."""
        return {
            name: (float(r.worker[self.side].norm()), float(r.owner[self.side].norm()))
            for name, r in self._residuals.items()
        }

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all residuals by parameter name."""
        return {
            name: {
                "worker": r.worker[self.side].clone(),
                "owner": r.owner[self.side].clone(),
                "layout": r.layout,
            }
            for name, r in self._residuals.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over what `state_dict` returned; residuals of other names become zero.

        Raises:
            ValueError: a parameter has another size here.
        """
        for name in self._residuals.keys() - state.keys():
            for buffer in (*self._residuals[name].worker, *self._residuals[name].owner):
                buffer.zero_()
        for name, saved in state.items():
            worker, owner = saved["worker"], saved["owner"]
            mine = self.residual(name, worker.numel(), worker.device)
            mine.worker[self.side].copy_(worker)
            mine.owner[self.side].copy_(owner)
            mine.layout = saved["layout"]


def _zeros(numel: int, device: torch.device) -> Residual:
    worker = (_untouched_zeros(numel, device), _untouched_zeros(numel, device))
    owner = (_untouched_zeros(numel, device), _untouched_zeros(numel, device))
    return Residual(worker=worker, owner=owner, layout="")


def _untouched_zeros(numel: int, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory before they are written; `torch.zeros` writes them all."""
    if device.type != "cpu" or numel < _SLICE:
        return torch.zeros(numel, dtype=torch.float32, device=device)
    pages = mmap.mmap(-1, 4 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32)
