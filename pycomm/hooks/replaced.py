"""State for wrappers whose own reductions are replaced, since they offer no hook for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pycomm.errors import Error
from pycomm.reduction.state import CompressionState
from pycomm.reduction.step import StepStatus

_ATTRIBUTE = "_pycomm_state"


class ReplacedState(CompressionState):
    """State of a wrapper that reduces its gradients by methods of its own.

    Such methods are replaced on the one object, not on its class. Between `open_step` and
    `close_step` the wrapper's buckets are reduced. Gradients that the
    wrapper throws away for other reasons than values that are not finite are not noticed:
    `discard` declares them.
    """

    def _attach(self, wrapper: nn.Module) -> None:
        """Let `state_of` find this state."""
        vars(wrapper)[_ATTRIBUTE] = self

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
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

    @property
    def is_open(self) -> bool:
        """Whether a step has begun, and not all of its buckets have been given to `reduce`."""
        return self._current.status is StepStatus.OPEN

    def open_step(self) -> None:
        """Begin a step, if none is open."""
        if not self.is_open:
            self.begin_step()

    def close_step(self) -> None:
        """End the step, if one is open."""
        if self.is_open:
            self.end_step()


def state_in(wrapper: nn.Module) -> ReplacedState | None:
    """Return the state that reduces a wrapper's gradients, if there is one."""
    found: ReplacedState | None = vars(wrapper).get(_ATTRIBUTE)
    return found


def is_a(wrapper: nn.Module, module: str, name: str) -> bool:
    """Return whether a module's class is, or inherits, one of a package that is not imported."""
    return any(c.__name__ == name and c.__module__ == module for c in type(wrapper).__mro__)
