"""Loading parts of a torch.distributed.checkpoint whose sizes are not known beforehand."""

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
    """Load the named parts directly below `key`; collective.

    Ranks may name different parts. Tensors come to the CPU.

    Args:
        checkpoint_id: the folder, as ``dcp.save`` got it.
        key: key of the saved dict.
        parts: keys in that dict. Missing and empty ones are left out.
        group: the ranks that load.

    Raises:
        ValueError: the checkpoint has nothing under the key.
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
            place[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        else:
            place[path[-1]] = ()
    if not found:
        raise ValueError(
            f"the checkpoint {checkpoint_id} has nothing under {key!r}: pass the key of dcp.save"
        )
    state = {key: wanted}
    load(state, storage_reader=reader, process_group=group)
    return state[key]
