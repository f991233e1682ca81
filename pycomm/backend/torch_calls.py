"""Calls of torch that ask whether a backend is Gloo or NCCL, and that pycomm answers, too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

Find = Callable[..., Any]


def let_torch_set_timeouts(find: Find) -> None:
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


def let_torch_monitor_barriers(find: Find) -> None:
    """Let ``torch.distributed.monitored_barrier`` reach pycomm's backends, too.

    torch compares the group's name with Gloo's. Every other group gets torch's own function.

    Args:
        find: function that returns the pycomm backend of a group, or None.
    """
    original = dist.monitored_barrier
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        ours = isinstance(group, (dist.ProcessGroup, type(None))) and find(group) is not None
        if not ours or distributed_c10d._rank_not_in_group(group):
            original(group, timeout, wait_all_ranks)
            return
        chosen: Any = group or distributed_c10d._get_default_group()
        if timeout is None:
            chosen.monitored_barrier(wait_all_ranks=wait_all_ranks)
            return
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier
