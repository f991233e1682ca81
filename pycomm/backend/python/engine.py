"""Engine: runs the operations of the backend in Python; csrc/binding/torch/engine.h in Python.

Synchronous operations run on the caller's thread, asynchronous ones in order on the group's own.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch._C import _distributed_c10d

from pycomm import _C
from pycomm.backend.python.store import TorchStore
from pycomm.backend.python.tensors import DTYPES, flat, write_back
from pycomm.backend.python.work import PeerWork, Work
from pycomm.errors import Error, PeerLost, Timeout

Op = Callable[[_C.Communicator], None]

# The core's names of operations, for the trace; others are shown as barriers.
TRACED = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}


class Engine:
    """All state that the operations of a group use.

    Args:
        core: the group's communicator.
        store: the store of its rendezvous.
        group: its name there.
    """

    def __init__(self, core: _C.Communicator, store: TorchStore, group: str) -> None:
        self.core, self.store, self.group = core, store, group
        self.queue = _C.Queue()
        self._peer_waiter = _C.Queue()
        self._posted: list[PeerWork] = []
        self._posted_lock = threading.Lock()  # never held while a work is completed
        self._prune_at = 16
        self._wanted: set[PeerWork] = set()  # the peer waiter waits for these
        self._children: dict[tuple[str, tuple[int, ...]], int] = {}
        self._process = os.getpid()
        self.seq = 0
        self._peer_seq = 0
        self.error = _distributed_c10d.ErrorType.SUCCESS
        _engines.add(self)

    def in_child(self) -> bool:
        """Return whether this is a copy in a forked child, which has none of the threads."""
        return os.getpid() != self._process

    def count_child(self, name: str, ranks: Sequence[int]) -> int:
        """Return how many groups of this name these ranks made from this one, with the next."""
        key = name, tuple(ranks)
        self._children[key] = self._children.get(key, 0) + 1
        return self._children[key]

    # -- collectives

    def run(self, name: str, outputs: Sequence[torch.Tensor], op: Op) -> None:
        """Run op(core) on the caller's thread, after what is queued."""
        self.seq += 1
        core = self.core
        noted = 0 if self.queue.idle() else self._note(name, outputs)

        def perform() -> None:
            if noted:
                core.resume(noted)
            try:
                op(core)
            finally:
                if noted:
                    core.resume(0)

        try:
            self.queue.run(perform)
        except Error as error:
            self.note(error)
            raise

    def submit(self, name: str, outputs: Sequence[torch.Tensor], op: Op) -> Work:
        """Run op(core) on the group's thread.

        A callback of another operation runs there already: an operation that it issues runs at
        once, so that it comes before all later operations on every rank.
        """
        self.seq += 1
        noted = self._note(name, outputs)
        work = Work(self, name, self.seq, outputs)
        core = self.core

        def perform() -> None:
            error: BaseException | None = None
            core.resume(noted)
            try:
                op(core)
            except Error as caught:
                self.note(caught)
                error = caught
            except Exception as caught:  # a copy of a tensor has failed, say
                error = caught
            core.resume(0)
            work.end(error)

        if self.queue.inside():
            perform()
        else:
            self.queue.submit(perform)
        return work

    def done(self, name: str, outputs: Sequence[torch.Tensor]) -> Work:
        """Return the handle of an operation that has just run."""
        work = Work(self, name, self.seq, outputs)
        work.end()
        return work

    def _note(self, name: str, outputs: Sequence[torch.Tensor]) -> int:
        """Show an operation in the trace from now on, not only from when it runs."""
        traced = TRACED.get(name, "barrier")
        if not outputs:
            return self.core.note_issued(_C.OpTag(traced, seq=0))
        numel = outputs[0].numel()
        if name == "all_gather_single":
            numel //= self.core.size
        dtype = DTYPES.get(outputs[0].dtype, _C.DType.uint8)
        return self.core.note_issued(_C.OpTag(traced, seq=0, numel=numel, dtype=dtype))

    def compare(self, what: str, digest: int) -> None:
        """Queue a comparison, so that it comes between the same two operations on all ranks."""
        if self.queue.inside() or self.queue.idle():
            self.core.compare(what, digest)
        else:
            core = self.core
            self.queue.submit(lambda: core.compare(what, digest))

    # -- sends and receives: requests are under way from the start, and are not queued

    def post(self, name: str, tensor: torch.Tensor, peer: int, tag: int) -> PeerWork:
        """Post a send, or a receive; peer -1: from any rank."""
        sends = name == "send"
        buffer = flat(tensor, copies=sends)
        call = self.core.send if sends else self.core.recv
        request = call(buffer.data_ptr(), buffer.nbytes, peer, tag)
        self._peer_seq += 1

        def finish() -> None:
            if not sends:
                write_back(buffer, tensor)

        work = PeerWork(self, name, self._peer_seq, [tensor], request, finish)
        # The core uses the memory until the request is done, even if the caller drops the work.
        with self._posted_lock:
            self._posted.append(work)
            full = len(self._posted) > self._prune_at
        if full:
            self._prune()
        return work

    def _prune(self) -> None:
        """Forget what is done, also its copy to the tensor: callbacks of futures may run here."""
        done = {work for work in list(self._posted) if work.is_completed()}
        with self._posted_lock:
            self._posted = [work for work in self._posted if work not in done]
            self._prune_at = max(16, 2 * len(self._posted))

    def settle_later(self, work: PeerWork) -> None:
        """Complete the work on a separate thread when its request is done."""
        if work in self._wanted:
            return
        self._wanted.add(work)

        def settle() -> None:
            work.settle()
            self._wanted.discard(work)

        self._peer_waiter.submit(settle)

    def settle_all(self) -> None:
        """Wait for the collectives, and for every send and receive, also those that were dropped.

        There are no hooks of completion to wait for: this backend has none.
        """
        self.queue.drain()
        for work in list(self._posted):
            with suppress(Error):  # it is the work's
                work.wait()

    # -- the end

    def note(self, error: Error) -> None:
        """Keep the kind of an error for `get_error`."""
        kinds = _distributed_c10d.ErrorType
        self.error = (
            kinds.TIMEOUT
            if isinstance(error, Timeout)
            else kinds.REMOTE_ERROR
            if isinstance(error, PeerLost)
            else kinds.COMM_ERROR
        )

    def abort(self, why: str) -> None:
        """End all operations on all ranks."""
        self.core.abort(f"rank {self.core.rank} {why}")

    def finish(self) -> None:
        """Finish the collectives. Sends and receives are given up: a peer may never answer them."""
        if self.in_child():
            return
        self.queue.drain()
        if any(work.needs_its_buffer() for work in list(self._wanted)):
            # Otherwise threads that wait for their futures would wait for the whole deadline.
            self.abort("left while sends or receives were under way")
        self.core.end_requests()
        self._peer_waiter.drain()
        with self._posted_lock:
            self._posted.clear()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _finish_all() -> None:
    """End the threads of all groups before the interpreter ends, which they need."""
    for engine in list(_engines):
        with suppress(Exception):
            engine.finish()


atexit.register(_finish_all)
