"""Process groups that pycomm makes for one of its objects, and closes with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from pycomm import backend
from pycomm.policy.exchange import device_of, gather

T = TypeVar("T")

_lock = threading.RLock()  # a collection inside of it may close a group on the same thread
_counting = 0  # groups that are being made
_to_close: list[dist.ProcessGroup] = []  # closed meanwhile, by other threads or collections


def make(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks, with the same backends and timeout; collective."""
    with _number_of_groups_stays():
        _count_alike(group)
        return _make(group, range(group.size()), dist.get_backend(group))


def make_part(
    group: dist.ProcessGroup, members: Sequence[int], *, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Return a new group of some ranks of a group; None: there are fewer than two.

    All ranks of `group` call it together, each for the ranks that it is among, or for none.

    Args:
        group: a group of these ranks.
        members: their numbers in `group`, ascending.
        backend: name of the new group's backend; None: as the default group's.
    """
    with _number_of_groups_stays():
        _count_alike(group)
        if len(members) < 2:
            _count(f"no group {len(c10d._world.pg_names)}")
            return None
        return _make(group, members, backend)


def _make(
    group: dist.ProcessGroup, members: Sequence[int], backend: str | None
) -> dist.ProcessGroup:
    everybody = dist.get_process_group_ranks(group)
    options = getattr(group._get_backend(device_of(group)), "options", None)
    made: dist.ProcessGroup = dist.new_group(
        [everybody[rank] for rank in members],
        timeout=getattr(options, "_timeout", None),
        backend=backend,
        use_local_synchronization=True,
    )
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

    An empty group takes its place. While another thread makes a group, it is closed after that.
    """
    with _lock:
        if _counting:
            _to_close.append(group)
        else:
            _close(group)


def _close(group: dist.ProcessGroup) -> None:
    if group not in c10d._world.pg_map:
        return  # destroy_process_group() has closed all groups
    name = c10d._world.pg_names[group]
    dist.destroy_process_group(group)
    _count(name)


@contextmanager
def _number_of_groups_stays() -> Iterator[None]:
    """Close no group meanwhile: it is not counted until its empty group is.

    A lock would do less well: a thread that waited for it would keep its reductions waiting, which
    other ranks may need before they make their groups.
    """
    global _counting
    with _lock:
        _counting += 1
    try:
        yield
    finally:
        with _lock:
            _counting -= 1
            while _to_close and not _counting:
                _close(_to_close.pop())


def _count_alike(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group count as many groups as that of them with most; collective.

    Some of them may have made groups without the others, such as those of a model of half of the
    ranks.
    """
    ours = len(c10d._world.pg_names)
    counts = gather([ours], group, device_of(group))
    for number in range(ours, int(max(count for (count,) in counts))):
        _count(f"no group {number}")


def _count(name: str) -> None:
    """Put an empty group among those that torch counts.

    torch names a group of some ranks by the number of groups, which must be equal on all of them.
    """
    c10d._world.pg_names[dist.ProcessGroup(HashStore(), 0, 1)] = c10d.GroupName(name)
