"""Parts of a checkpoint of torch.distributed.checkpoint, whose size nobody knows beforehand."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def load_saved(
    checkpoint_id: str | os.PathLike[str],
    key: str,
    parts: Collection[str],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Return what was saved under `key`, of the parts right below it that are named; collective.

    Ranks may name different parts. Tensors come to the CPU.

    Args:
        checkpoint_id: the folder, as ``dcp.save`` got it.
        key: of the dict that was saved.
        parts: keys of that dict. One that it does not have is left out, as is an empty one.
        group: the ranks that load.

    Raises:
        ValueError: there is nothing under the key.
    """
    reader = FileSystemReader(checkpoint_id)
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {}
    found = False
    for flat, path in (metadata.planner_data or {}).items():
        found |= path[0] == key
        if path[0] != key or path[1] not in parts:
            continue
        place = wanted
        for step in path[1:-1]:
            place = place.setdefault(step, {})
        entry = metadata.state_dict_metadata[flat]
        if isinstance(entry, TensorStorageMetadata):
            place[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            place[path[-1]] = ()
    if not found:
        raise ValueError(f"the checkpoint {checkpoint_id} has nothing under {key!r}")
    state = {key: wanted}
    load(state, storage_reader=reader, process_group=group)
    return state[key]
