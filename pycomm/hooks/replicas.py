"""Comparison of replicas: the parameters are compared once per step, without an extra message.

A digest of the parameters travels with the group's next operation, if the group has the check
"results" (csrc/collectives/group/result_checksums.h). Replicas that differ raise an error that
names the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from pycomm import _C
from pycomm.backend import find
from pycomm.hooks.fsdp_seams import units

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that differs if a bit of the tensors differs.

    CPU memory is hashed in place (CRC-32C). The words of a tensor on a device are summed there as
    integers, and the sums are hashed: that misses values that have changed places.

    Args:
        tensors: any shapes and dtypes.

    Returns:
        1 to 2^32 - 1.
    """
    here, sums = [], []
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        if flat.device.type == "cpu":
            here.append(flat)
        else:
            words = flat.view(_WORDS[flat.element_size()])
            sums.append(words.sum(dtype=torch.int64))
    if sums:  # one copy, one wait
        here.append(torch.stack(sums).cpu())
    return _C.digest(_C.Parts([(x.data_ptr(), x.numel() * x.element_size()) for x in here]))


def _replicated(model: nn.Module) -> Iterator[tuple[dist.ProcessGroup, torch.Tensor]]:
    """Yield each replicated tensor with the group of ranks that have copies of it."""
    if isinstance(model, DistributedDataParallel):
        for parameter in model.module.parameters():
            yield model.process_group, parameter
        return
    for unit in units(model):
        for sharded in unit.parameters.values():
            if isinstance(sharded.mesh_info, DDPMeshInfo):
                yield sharded.mesh_info.replicate_process_group, sharded.sharded_param.to_local()


class _Watch:
    """A forward pre-hook that compares the parameters before each training step."""

    def __init__(self) -> None:
        self.step = 0

    @torch.no_grad()
    def __call__(self, model: nn.Module, *_: Any) -> None:
        if not model.training or not _synchronizes(model):
            return
        self.step += 1
        for group, copies in _by_group(model).items():
            backend = find(group, copies[0].device)
            if backend is not None:
                backend.compare(f"the parameters before step {self.step}", digest(copies))


def _synchronizes(model: nn.Module) -> bool:
    """Return whether the next backward pass makes the replicas equal again."""
    if not isinstance(model, DistributedDataParallel):
        return True
    return model.require_backward_grad_sync and not model._join_config.enable


def _by_group(model: nn.Module) -> dict[dist.ProcessGroup, list[torch.Tensor]]:
    found: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for group, copy in _replicated(model):
        found.setdefault(group, []).append(copy)
    return found


def watch_if_asked(model: nn.Module) -> None:
    """Compare the parameters of all replicas before every training step, if their groups check.

    The group's next operation raises `pycomm.WireMismatch` on all ranks if the replicas differ:
    memory is faulty, or a replica has missed an update. With fully_shard on a mesh of two
    dimensions (HSDP) replicas of shards are compared. A model that is compressed again after
    `remove` is watched already, and is compared once.
    """
    if any(isinstance(hook, _Watch) for hook in model._forward_pre_hooks.values()):
        return
    groups = _by_group(model)
    backends = [find(group, copies[0].device) for group, copies in groups.items()]
    if backends and all(backend is not None and backend.compares for backend in backends):
        model.register_forward_pre_hook(_Watch(), prepend=True)
