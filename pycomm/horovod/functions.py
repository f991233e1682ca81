"""Copies of the first rank's parameters, optimizer and objects, with which training begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm.elastic.contents import keep_dtypes
from pycomm.horovod.basics import places, rank, size, world
from pycomm.horovod.operations import broadcast_async_
from pycomm.policy.exchange import device_of
from pycomm.reduction import members

Named = tuple[Any, torch.Tensor]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | Named],
    root_rank: int = 0,
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
    named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    for _, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "broadcast_parameters takes a state_dict, named_parameters() or parameters(), "
                f"and found a {type(tensor).__name__}"
            )
    with torch.no_grad():
        for handle in [broadcast_async_(t, root_rank) for _, t in named]:
            handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
) -> None:
    """Overwrite an optimizer's state and options by those of one rank; collective.

    Only that rank needs to have a state, such as one that it has loaded from a checkpoint. States
    keep their dtypes, also where `load_state_dict` would cast them to that of the parameter.

    Args:
        optimizer: any optimizer, also a `DistributedOptimizer`.
        root_rank: the rank whose state counts.
        model: not used.

    Raises:
        Error: the state has objects of classes that are no numbers, texts, containers or tensors,
            and that `torch.serialization.add_safe_globals` does not name; on all ranks.
    """
    root = rank() == root_rank
    group = world()
    saved = optimizer.state_dict() if root else None
    saved = members.broadcast_object(saved, root_rank, group, device_of(group))
    if not root:
        optimizer.load_state_dict(saved)
        keep_dtypes(optimizer, saved)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of one rank; collective.

    Any object that can be pickled: reading it runs code that the sender chooses, as with
    `torch.distributed.broadcast_object_list`.
    """
    letter = [obj if rank() == root_rank else None]
    dist.broadcast_object_list(letter, root_rank)
    return obj if rank() == root_rank else letter[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order; collective. See `broadcast_object`."""
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, obj)
    return everyone
