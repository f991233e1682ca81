"""GradientHook: a parameter's hook, which looks at its gradient before a backward adds to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class GradientHook:
    """Tells an object of a parameter's next gradient.

    The reference is weak, since parameters outlive a state.

    Args:
        owner: the object, whose `look` is called.
        name: the parameter's name, with which it is called.
    """

    __torch_unserializable__ = True  # torch.save of the parameter leaves the hook out silently

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, _: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.look(self._name)
