"""Handles of operations of the backend in Python: csrc/binding/torch/work.h in Python.

Torch gives callers a holder of these objects that passes on `wait` and `get_future` alone; its
`is_completed` stays False (torch 2.14 and 2.15). The backend's own methods return them as they are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d

from pycomm import _C
from pycomm.errors import Error, Timeout

NO_TIMEOUT = timedelta(0)


class Runner(Protocol):
    """What works need of the engine that runs them."""

    @property
    def core(self) -> _C.Communicator:
        """The group's communicator."""

    @property
    def queue(self) -> _C.Queue:
        """The queue of asynchronous operations."""

    def abort(self, why: str) -> None:
        """End all operations on all ranks."""

    def note(self, error: Error) -> None:
        """Keep the kind of an error."""

    def settle_later(self, work: PeerWork) -> None:
        """Complete a work when its request is done."""


class Work(_distributed_c10d.Work):
    """One issued operation. Its future completes, and callbacks run, in the order of issue.

    Args:
        engine: runs the operation.
        name: torch's name of it.
        seq: its number in the group.
        outputs: the tensors that it writes.
    """

    def __init__(self, engine: Runner, name: str, seq: int, outputs: Sequence[torch.Tensor]):
        super().__init__()
        self.engine = engine
        self._name, self._seq, self._outputs = name, seq, list(outputs)
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._done = False
        self._running = threading.Lock()  # held until it is done
        self._running.acquire()
        self._future_lock = threading.Lock()
        self._ended: torch.futures.Future[None] | None = None  # what the future depends on
        self._future: torch.futures.Future[Any] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Complete the work, with an error if there was one."""
        with self._future_lock:
            self._error = error
            self._done = True
            ended = self._ended
        self._running.release()
        if ended is not None:
            ended.set_result(None)

    def describe(self) -> str:
        """Return rank, name and number."""
        return f"rank {self.engine.core.rank}: {self._name} #{self._seq}"

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is done. A timeout ends this wait, not the operation.

        In a callback, which runs on the thread that also runs later operations, these are run
        meanwhile.

        Raises:
            Error: of the operation, with its type; Timeout: it was not done in time.
        """
        if not self._done:
            self._wait(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, seconds: float) -> None:
        if os.getpid() != self._process:
            raise Error(
                f"{self.describe()} was issued by the parent of this forked child, and only the "
                "parent can wait for it"
            )
        if _C.Queue.inside_any():
            self._run_what_is_queued(seconds)
        limit = min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else -1
        if not self._running.acquire(timeout=limit):
            raise Timeout(
                f"{self.describe()} timed out: it was not done after a wait of "
                f"{round(seconds * 1000)} ms; it continues{self.engine.core.describe_ranks()}"
            )
        self._running.release()

    def _run_what_is_queued(self, seconds: float) -> None:
        queue, limit = self.engine.queue, seconds if seconds > 0 else float("inf")
        if not queue.inside():
            queue.wait_from_another(self.is_completed, limit)
        elif not queue.run_until(self.is_completed, limit) and seconds <= 0:
            raise Error(
                f"{self.describe()} cannot be waited for here: this is a callback on the thread "
                "that would complete it"
            )

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._done

    def is_success(self) -> bool:
        """Return whether it is done and has succeeded."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return its error."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it writes."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait: for CPU tensors the caller is the stream."""
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors."""
        with self._future_lock:
            if self._future is not None:
                return self._future
            # A callback's exception becomes an error of the future in C++, too, where DDP reads it;
            # set_exception() would make a value of it there.
            devices: list[int | str | torch.device] = []
            devices += sorted({t.device for t in self._outputs if not t.is_cpu}, key=str)
            ended: torch.futures.Future[None] = torch.futures.Future(devices=devices)
            self._future = ended.then(self._value)
            done = self._done
            if not done:
                self._ended = ended
        if done:
            ended.set_result(None)
        return self._future

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a future of a number that says how it ended; never an error."""

        def how(_: Any) -> int:
            if self._error is None:
                return 0
            return 1 if isinstance(self._error, Timeout) else 2

        return self.get_future().then(how)

    def abort(self) -> None:
        """End the whole group, as NCCL does: ranks cannot agree on leaving out one operation."""
        if not self._done:
            self.engine.abort(f"aborted its {self._name}")

    def _get_sequence_number(self) -> int:
        return self._seq


class PeerWork(Work):
    """A posted send or receive. The thread that waits for it completes it.

    Args:
        engine, name, seq, outputs: as for `Work`.
        request: the core's.
        finish: copies what was received into the tensor.
    """

    def __init__(
        self,
        engine: Runner,
        name: str,
        seq: int,
        outputs: Sequence[torch.Tensor],
        request: _C.Request,
        finish: Callable[[], None],
    ) -> None:
        super().__init__(engine, name, seq, outputs)
        self._request, self._finish = request, finish
        self._settled = threading.Lock()  # held from when a thread begins to complete it

    def needs_its_buffer(self) -> bool:
        """Return whether the core may still use the tensor's memory."""
        return not self._request.done()

    def is_completed(self) -> bool:
        """Return whether it is done; complete it if only that was missing."""
        if not self._done and self._request.done():
            self.settle()
        return self._done

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is done.

        Raises:
            Error: of the operation; Timeout: it was not done in time.
        """
        if not self._done:
            try:
                self._request.wait(max(timeout.total_seconds(), 0.0))
            except Error as error:
                self.engine.note(error)
                raise
            self.settle()
            # Another thread may be about to complete it: no queued operation has to run for that.
            with self._running:
                pass
        return super().wait()

    def settle(self) -> None:
        """Wait for the request and complete the work, unless another thread does that."""
        if not self._settled.acquire(blocking=False):
            return
        error: Error | None = None
        try:
            self._request.wait()
            self._finish()
        except Error as caught:
            error = caught
            self.engine.note(error)
        self.end(error)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future, which another thread completes."""
        future = super().get_future()
        if not self.is_completed():
            self.engine.settle_later(self)
        return future

    def source_rank(self) -> int:
        """Return the rank that has sent it."""
        return self._request.source()

    _source_rank = source_rank


class CoalescedWork(_distributed_c10d.Work):
    """Several operations that are waited for as one, at least one, in the order of issue."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all of them; the timeout counts for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all are done."""
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        """Return whether all have succeeded."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error."""
        return next((e for work in self._works if (e := work.exception())), None)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of all tensors."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [t for future in done.value() for t in future.value()])

    def abort(self) -> None:
        """End the group."""
        for work in self._works:
            work.abort()

    def _get_sequence_number(self) -> int:
        return self._works[-1]._get_sequence_number()
