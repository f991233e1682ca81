"""Process groups that pycomm makes for one of its objects, and closes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from pycomm import backend

T = TypeVar("T")


def make(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks; collective."""
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def wait(result: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what a thread that has the group to itself returns, by the function that waits for it.

    A signal whose handler raises something like KeyboardInterrupt ends the wait, and aborts the
    group: the thread would wait for other ranks, and the process for the thread.
    """
    try:
        return result()
    except Exception:
        raise
    except BaseException:
        ours = backend.find(group)
        if ours is not None:
            ours.abort()
        raise


def close(group: dist.ProcessGroup) -> None:
    """Close a group of `make`; ranks may do so at different times, as their garbage is collected.

    torch names the next group of these ranks by the number of groups that there are, which must be
    equal on all ranks. So an empty group takes the place of the closed one.
    """
    if group not in c10d._world.pg_map:
        return  # destroy_process_group() has closed all groups
    name = c10d._world.pg_names[group]
    dist.destroy_process_group(group)
    c10d._world.pg_names[dist.ProcessGroup(HashStore(), 0, 1)] = name
