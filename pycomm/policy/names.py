"""Names of parameters, independent of the wrappers around their modules.

`torch.compile`, activation checkpointing and FSDP1 insert a component into the names of wrapped
parameters, and names in a module that is wrapped once more begin with "module.". A parameter must
match the same rule and find its residual in a checkpoint with any of these wrappers or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_OUTER = "module."  # the name of the wrapped module in DistributedDataParallel and others

_T = TypeVar("_T")


@lru_cache(maxsize=1 << 16)
def clean(name: str) -> str:
    """Return a name, or a pattern of names, without the components that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@lru_cache(maxsize=1 << 16)
def bare(name: str) -> str:
    """Return a name, or a pattern, without the prefix of wrappers of the whole model either.

    "module.*" stays: it may mean a submodule of this name, and must not match everything.
    """
    name = clean(name)
    while name.startswith(_OUTER) and name != f"{_OUTER}*":
        name = name.removeprefix(_OUTER)
    return name


def matching(saved: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Map saved names to the names of the same parameters here; unknown ones are left out.

    Args:
        saved: names in this or another wrapping of the model.
        known: names of the parameters here.
    """
    by_bare: dict[str, list[str]] = {}
    for name in known:
        by_bare.setdefault(bare(name), []).append(name)
    found = {}
    for name in saved:
        if name in known:
            found[name] = name
        elif len(candidates := by_bare.get(bare(name), [])) == 1:
            found[name] = candidates[0]
    return found


def renamed(entries: Mapping[str, _T], names: Mapping[str, str]) -> dict[str, _T]:
    """Return entries under their names here, by `matching`; other names stay."""
    return {names.get(name, name): entry for name, entry in entries.items()}


def few(names: Iterable[str]) -> str:
    """Return the first names for an error text, and the number of further ones."""
    listed, most = list(names), 5
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
