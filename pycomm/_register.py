"""Tells torch.distributed the name "pycomm". Nothing else of the package is needed for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def register(create: Callable[..., Any]) -> None:
    """Register the backend "pycomm"; may be called again.

    Args:
        create: makes the backend of one group, see `pycomm.backend.create`.

    Raises:
        Exception: any kind, from a torch without distributed or one that has changed.
    """
    backend = import_module("torch.distributed").Backend
    # A list: torch would read a string letter by letter. One backend for both devices, because
    # all backends that torch does not know share one place in a group.
    backend.register_backend("pycomm", create, extended_api=True, devices=["cpu", "cuda"])
