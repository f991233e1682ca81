"""Wrappers whose own reductions are replaced, since they offer no hook for them.

Their methods are replaced on the one object, not on its class. Gradients that a wrapper throws away
for other reasons than values that are not finite are not noticed: `CompressionState.discard`
declares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pycomm.errors import Error
from pycomm.reduction.state import CompressionState


def attach(state: CompressionState, wrapper: nn.Module) -> None:
    """Let `pycomm.state_of` find the state of a wrapper whose parameters it has; collective."""
    state.agree()
    vars(wrapper)["_comm_hooks"] = [(None, state)]  # as DDP has its hooks


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method of one object, and return the original.

    Raises:
        Error: the object has no such method in this version of its package.
    """
    original: Callable[..., Any] | None = getattr(owner, name, None)
    if original is None:
        package = type(owner).__module__.partition(".")[0]
        raise Error(
            f"this version of {package} cannot be compressed: its {type(owner).__name__} has "
            f"no {name}. docs/trainers.md has the versions that are tested"
        )
    setattr(owner, name, function)
    return original


def refuse_second(wrapper: nn.Module, what: str) -> None:
    """Refuse to compress a wrapper twice.

    Raises:
        Error: it has a state.
    """
    if "_comm_hooks" in vars(wrapper):
        raise Error(
            f"this {what} is compressed already: change its codec by set_policy() of that state; "
            "under pycomm.run --codec leave out this line"
        )


def is_a(wrapper: nn.Module, module: str, name: str) -> bool:
    """Return whether a module's class is, or inherits, one of a package that is not imported."""
    return any(c.__name__ == name and c.__module__ == module for c in type(wrapper).__mro__)
