"""Copies of the first rank's parameters, optimizer and objects, with which training begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pycomm.horovod.basics import places, rank, size
from pycomm.horovod.operations import broadcast_async_

Named = tuple[Any, torch.Tensor]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | Named], root_rank: int = 0
) -> None:
    """Overwrite parameters by those of one rank; collective.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`; the same
            on all ranks.
        root_rank: the rank whose values count.

    Raises:
        TypeError: an entry is no tensor.
    """
    places()
    if isinstance(params, Mapping):
        params = [(name, params[name]) for name in sorted(params)]
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "broadcast_parameters takes a state_dict, named_parameters() or parameters(), "
                f"and found a {type(tensor).__name__}"
            )
    with torch.no_grad():
        for handle in [broadcast_async_(tensor, root_rank) for tensor in tensors]:
            handle.wait()


@dataclass(frozen=True)
class _Values:
    """In the place of a tensor, which travels by itself."""

    shape: torch.Size
    dtype: torch.dtype


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Overwrite an optimizer's state and options by those of one rank; collective.

    Only that rank needs to have a state, such as one that it has loaded from a checkpoint.

    Args:
        optimizer: any optimizer, also a `DistributedOptimizer`.
        root_rank: the rank whose state counts.
    """
    tensors: list[torch.Tensor] = []

    def take(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item.detach())
            return _Values(item.shape, item.dtype)
        if isinstance(item, dict):
            return {key: take(value) for key, value in item.items()}
        return type(item)(take(value) for value in item) if type(item) in (list, tuple) else item

    def put(item: Any) -> Any:
        if isinstance(item, _Values):
            tensor = next(received)
            return tensor
        if isinstance(item, dict):
            return {key: put(value) for key, value in item.items()}
        return type(item)(put(value) for value in item) if type(item) in (list, tuple) else item

    root = rank() == root_rank
    state = broadcast_object(take(optimizer.state_dict()) if root else None, root_rank)
    if not root:
        tensors = [
            torch.empty(values.shape, dtype=values.dtype, device="cpu") for values in _found(state)
        ]
    sent = [tensor.cpu().contiguous() for tensor in tensors]
    for handle in [broadcast_async_(tensor, root_rank) for tensor in sent]:
        handle.wait()
    if not root:
        received = iter(sent)
        optimizer.load_state_dict(put(state))


def _found(item: Any) -> list[_Values]:
    """Return the places of tensors in a structure, in the order in which they travel."""
    if isinstance(item, _Values):
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    if type(item) in (list, tuple):
        return [values for part in item for values in _found(part)]
    return []


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of one rank, which is pickled; collective."""
    places()
    letter = [obj if dist.get_rank() == root_rank else None]
    dist.broadcast_object_list(letter, root_rank)
    return obj if dist.get_rank() == root_rank else letter[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, which are pickled, in rank order; collective."""
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, obj)
    return everyone
