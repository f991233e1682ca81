"""The thread that reduces buckets of the host beside backward, on groups of other backends."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pycomm.reduction import own_group

Tasks = queue.SimpleQueue["Callable[[], None] | None"]

_PATIENCE = 5.0  # seconds that the interpreter waits at its end for what is under way


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
        self.group = own_group.make(group)
        """The group that reductions use, and no other code."""
        self._tasks: Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._started_in = 0  # the process that has the thread: a forked child starts its own
        self._errors: list[BaseException] = []  # one, and the group is of no use
        weakref.finalize(self, _end, self._tasks, self.group).atexit = False
        _living.add(self)

    def run(
        self, tensor: torch.Tensor, reduce: Callable[[], torch.Tensor | None]
    ) -> tuple[torch.futures.Future[torch.Tensor], Callable[[], bool]]:
        """Queue the reduction of a bucket; all ranks queue the same ones in the same order.

        Args:
            tensor: what the reduction reads and writes.
            reduce: returns whether the result is finite, as a tensor of one value.

        Returns:
            A future of `tensor`; and a function that waits for it, and returns whether it has come
            and is finite.

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
        finite: list[torch.Tensor | None] = []
        # Whoever has waited may drop the state, which the reduction holds, and expect it to go.
        held, errors = [reduce], self._errors
        del reduce

        def task() -> None:
            try:
                if not errors:
                    finite.append(held[0]())
            except BaseException as error:
                errors.append(error)
            held.clear()
            if errors:
                came._set_unwrap_func(_raise)
            # First: whoever gets the result may fork, and the child has nobody who releases it.
            under_way.release()
            came.set_result(errors[0] if errors else tensor)

        def is_finite() -> bool:
            with under_way:
                return bool(finite) and bool(finite[0])

        self._tasks.put(task)
        # DDP reads the value of a future, and would take an error for one.
        return came.then(lambda future: future.value()), is_finite

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
    own_group.close(group)
