"""Saved states: loading parts of a checkpoint, and checks against the model that loads them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from pycomm.log import logger
from pycomm.policy.names import few, matching

Entries = Mapping[str, Mapping[str, Any]]
"""Residuals by parameter name, as `Residuals.state_dict` returns them."""


def residuals_of(saved: Mapping[str, Any], key: str, step: int) -> Entries:
    """Return the residuals that one rank has saved.

    Args:
        saved: the loaded state.
        key: key of that rank's entry.
        step: step of the whole state.

    Raises:
        ValueError: the entry is of another step, for example because a loader filled a new state's
            `state_dict` and left out the residuals.
    """
    then, residuals = saved[key]
    if then != step:
        raise ValueError(
            f"the hook's state is of step {step}, and its entry {key} of step {then}: the "
            "residuals were not loaded with the rest. Load the entry as a whole, or use "
            "state.load_checkpoint(folder)"
        )
    entries: Entries = residuals
    return entries


def known(states: Sequence[Entries], here: Collection[str], *, tell: bool) -> list[Entries]:
    """Return residuals by the parameters' names here, without those of unknown parameters.

    Args:
        states: residuals of some ranks.
        here: names of all parameters; empty if they are not known yet.
        tell: warn about unknown parameters; set on one rank of a group.
    """
    if not here:
        return list(states)
    saved = dict.fromkeys(name for state in states for name in state)
    names = matching(saved, here)
    lost = [name for name in saved if name not in names]
    if lost and tell:
        logger.warning(
            "the state has residuals of parameters that this model does not have, and drops them: "
            "%s. Names here are %s",
            few(lost),
            few(here),
        )
    return [{names[n]: entry for n, entry in state.items() if n in names} for state in states]


def check_sizes(saved: Entries, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Check that parameters have the sizes of the saved residuals.

    Args:
        saved: residuals by name here.
        sizes: rows and values per row of this rank's part of each parameter, by name.

    Raises:
        ValueError: sizes differ; the text names the parameters.
    """
    wrong = []
    for name in saved.keys() & sizes.keys():
        numel, rows, *_ = saved[name]["about"]
        if (rows, numel) != sizes[name]:
            wrong.append(
                f"{name} had {rows} x {numel} values and has {' x '.join(map(str, sizes[name]))}"
            )
    if wrong:
        raise ValueError(f"the hook's state belongs to another model: {few(sorted(wrong))}")


def load_saved(
    checkpoint_id: str | os.PathLike[str],
    key: str,
    parts: Collection[str],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Load the named parts directly below `key` of a checkpoint, whatever their sizes; collective.

    Ranks may name different parts. Tensors come to the CPU.

    Args:
        checkpoint_id: the folder, as ``dcp.save`` got it.
        key: key of the saved dict.
        parts: keys in that dict. Missing and empty ones are left out.
        group: the ranks that load.

    Raises:
        ValueError: the checkpoint has no state under the key.
    """
    reader = FileSystemReader(checkpoint_id)
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {}
    found = False
    for flat, path in (metadata.planner_data or {}).items():
        found |= path[:2] == (key, "about")
        if len(path) < 2 or path[0] != key or path[1] not in parts:
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
            f"the checkpoint {checkpoint_id} has no state of pycomm under {key!r}: pass the key of "
            "dcp.save"
        )
    state = {key: wanted}
    load(state, storage_reader=reader, process_group=group)
    return state[key]
