"""Timeouts of groups that torch sets after they are made."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d


def let_torch_set_timeouts(find: Callable[[Any, torch.device], Any]) -> None:
    """Let torch's ``_set_pg_timeout`` reach pycomm's backends, too.

    torch 2.13 asks whether a backend is Gloo's or NCCL's class, and offers others no hook: it warns
    that nothing was set. torchtitan and Megatron lower the timeout by this function.

    Args:
        find: function that returns the pycomm backend of a group for a device, or None.
    """
    original = getattr(distributed_c10d, "_set_pg_timeout", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        chosen = group or distributed_c10d._get_default_group()
        ours = []
        if isinstance(chosen, distributed_c10d.ProcessGroup):
            found = [find(chosen, device) for device in chosen._device_types]
            ours = list({id(one): one for one in found if one is not None}.values())
        with warnings.catch_warnings():
            if ours:
                warnings.filterwarnings("ignore", message="Set timeout is now only supported")
            original(timeout, group)
        for backend in ours:
            backend.set_timeout(timeout)

    distributed_c10d._set_pg_timeout = set_timeout
