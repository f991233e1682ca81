"""Process groups that pycomm makes for one of its objects, and closes with it."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from pycomm import backend
from pycomm.policy.exchange import device_of, gather

T = TypeVar("T")

_made = 0  # groups that this process has made here
_chosen = threading.local()  # `name`: of the group that this thread makes


def _name_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function of names, but for the groups that are made here.

    torch names groups by counts of groups (of those that are there, from 2.14 on of those that were
    made). Ranks of which some have made others, such as those of a part of them, or have closed
    some on another thread, would give one group different names.
    """

    @functools.wraps(original)
    def name(*args: Any, **kwargs: Any) -> Any:
        chosen = getattr(_chosen, "name", None)
        return original(*args, **kwargs) if chosen is None else c10d.GroupName(chosen)

    return name


if hasattr(c10d, "_process_group_name"):  # private: a torch without it names groups in its own way
    c10d._process_group_name = _name_of(c10d._process_group_name)


def make(
    group: dist.ProcessGroup,
    members: Sequence[int] | None = None,
    *,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Return a new group of ranks of a group, with its timeout; collective.

    Args:
        group: the ranks that call this together, each for the ranks that it is among.
        members: their numbers in `group`, ascending; None: all of them.
        backend: name of the new group's backends; None: those of the group.
    """
    global _made
    # A number that no rank of the group has had for groups of it yet.
    number = int(max(made for (made,) in gather([_made], group, device_of(group))))
    _made = number + 1
    everybody = dist.get_process_group_ranks(group)
    options = getattr(group._get_backend(device_of(group)), "options", None)
    ranks = everybody if members is None else [everybody[rank] for rank in members]
    _chosen.name = hashlib.sha1(f"pycomm {number} {ranks}".encode()).hexdigest()
    try:
        new: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=getattr(options, "_timeout", None),
            backend=backend or dist.get_backend(group),
            use_local_synchronization=True,
        )
    finally:
        del _chosen.name
    return new


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

    An empty group takes its place.
    """
    if group not in c10d._world.pg_map:
        return  # destroy_process_group() has closed all groups
    name = c10d._world.pg_names[group]
    dist.destroy_process_group(group)
    # Until 2.13 torch names a user's group of some ranks by the number of groups that are there,
    # which must be equal on all of them.
    c10d._world.pg_names[dist.ProcessGroup(HashStore(), 0, 1)] = c10d.GroupName(name)
