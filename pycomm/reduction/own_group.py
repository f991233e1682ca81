"""Process groups that pycomm makes for one of its objects, and closes with it; a thread on one."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from pycomm import backend
from pycomm.policy.exchange import device_of, gather

T = TypeVar("T")
Tasks = queue.SimpleQueue["Callable[[], None] | None"]

_PATIENCE = 5.0  # seconds that the interpreter waits at its end for what is under way

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


class ExchangeThread:
    """Reduces buckets one after the other, on a process group that nobody else calls.

    A group of Gloo or MPI lets the thread that needs its results wait for the network: a hook that
    did so would keep backward waiting. A second thread that called the same group would mispair
    collectives, so this one has a group of its own.

    Collective. The group and the thread end with this object.

    Args:
        group: the ranks that reduce.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = make(group)
        """The group that reductions use, and no other code."""
        self._tasks: Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._started_in = 0  # the process that has the thread: a forked child starts its own
        self._errors: list[BaseException] = []  # one, and the group is of no use
        weakref.finalize(self, _end, self._tasks, self.group).atexit = False
        _living.add(self)

    def run(
        self, tensor: torch.Tensor, reduce: Callable[[], object]
    ) -> tuple[torch.futures.Future[torch.Tensor], Callable[[], bool]]:
        """Queue the reduction of a bucket; all ranks queue the same ones in the same order.

        Args:
            tensor: what the reduction reads and writes.
            reduce: makes `tensor` the result.

        Returns:
            A future of `tensor`; and a function that waits for it, and returns whether it has come.

        Raises:
            BaseException: the error of an earlier reduction, after which the group is of no use.
        """
        if self._errors:
            raise self._errors[0]
        if self._started_in != os.getpid():
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), daemon=True)
            self._thread.start()
            self._started_in = os.getpid()
        # A step calls this for every bucket: these are objects of C++ and C.
        came: Any = torch._C.Future([])
        under_way = threading.Lock()
        under_way.acquire()
        done: list[bool] = []
        # Whoever has waited may drop the state, which the reduction holds, and expect it to go.
        held, errors = [reduce], self._errors
        del reduce

        def task() -> None:
            try:
                if not errors:
                    held[0]()
                    done.append(True)
            except BaseException as error:
                errors.append(error)
            held.clear()
            if errors:
                came._set_unwrap_func(_raise)
            # First: whoever gets the result may fork, and the child has nobody who releases it.
            under_way.release()
            came.set_result(errors[0] if errors else tensor)

        def has_come() -> bool:
            with under_way:
                return bool(done)

        self._tasks.put(task)
        # DDP reads the value of a future, and would take an error for one.
        return came.then(lambda future: future.value()), has_come

    def end(self) -> None:
        """End the thread after what is queued, before the interpreter ends.

        A thread that returns from C++ to an interpreter that has ended aborts the process. What
        waits for other ranks is left alone after some seconds: it stays in C++.
        """
        self._tasks.put(None)
        if self._thread is not None:  # in a forked child one that has ended
            self._thread.join(_PATIENCE)


_living: weakref.WeakSet[ExchangeThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for thread in list(_living):
        thread.end()


def _raise(error: BaseException) -> None:
    raise error


def _serve(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds the bucket


def _end(tasks: Tasks, group: dist.ProcessGroup) -> None:
    tasks.put(None)
    close(group)
