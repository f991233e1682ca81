"""Groups of ranks as the cases use them: pycomm without torch, and process groups of torch.

Their `call` returns whether the result is right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import numpy as np

from pycomm.communicator import Communicator, Store
from tests.faults.injection.case import Call
from tests.ranks import good, on_threads

ENDS = 60.0
"""Seconds in which any call has ended, or its process was killed."""


def expected(call: Call, rank: int, ranks: int) -> Any:
    """Return a call's result where every rank r gives r + 1, and in an all_to_all 10 r + part."""
    if call.op in ("all_reduce", "reduce_scatter"):
        return ranks * (ranks + 1) / 2
    if call.op == "all_gather":
        return np.arange(1, ranks + 1)[:, None]
    if call.op == "all_to_all":
        return (10 * np.arange(ranks) + rank)[:, None]
    return call.root + 1 if call.op in ("broadcast", "scatter") else (rank - 1) % ranks + 1


class Group(ABC):
    """A group of either kind."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.completed = rank, ranks, 0

    def call(self, call: Call, async_op: bool) -> bool:
        one, many = self._new((call.numel,)), self._new((self.ranks, call.numel))
        one[:], many[:] = self.rank + 1, self.rank + 1
        if call.op == "all_to_all":
            many[:] = (10 * self.rank + np.arange(self.ranks))[:, None]
        out = many if call.op == "all_gather" else one
        if call.op in ("all_to_all", "send_recv"):
            out = np.empty_like(many if call.op == "all_to_all" else one)
        self._run(call, one, many, out, async_op)
        self.completed += call.op != "send_recv"
        if call.codec:  # codec errors are not tested here
            return bool(np.isfinite(out).all())
        return bool((out == expected(call, self.rank, self.ranks)).all())

    def _new(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, np.float32)

    @abstractmethod
    def _run(self, call: Call, one: Any, many: Any, out: Any, async_op: bool) -> None:
        """Run a call: of `one` or `many`, by its operation, to `out`."""


class CoreGroup(Group):
    """A `Communicator`. Async calls run on another thread, as in a process group."""

    def __init__(
        self,
        folder: str,
        name: str,
        rank: int,
        ranks: int,
        transport: str,
        timeout: float,
        *,
        hosts: int = 0,
        parent: CoreGroup | None = None,
    ) -> None:
        super().__init__(rank, ranks)
        self.in_heap = False
        """calls use memory that peers can access"""
        self.arrays: list[Any] = []
        """the arrays of the last call"""
        hosts = hosts or (2 if transport == "auto" else 0)  # declared; so transports are mixed
        self._core = Communicator(
            Store.file(folder),
            rank,
            ranks,
            group=name,
            transport=transport,
            timeout=timeout,
            parent=parent and parent._core,
            nodes=[r * hosts // ranks for r in range(ranks)] if hosts else [],
        )

    def set_timeout(self, seconds: float) -> None:
        self._core.timeout = seconds

    def _new(self, shape: tuple[int, ...]) -> Any:
        if not self.in_heap:
            return super()._new(shape)
        return np.asarray(self._core.allocate(int(np.prod(shape)))).reshape(shape)

    def _run(self, call: Call, one: Any, many: Any, out: Any, async_op: bool) -> None:
        self.arrays = [one, many]
        if async_op:
            good(on_threads([self.rank], lambda _: self._run(call, one, many, out, False), ENDS))
            return
        core, codec = self._core, call.codec
        if call.op == "all_reduce":
            core.all_reduce_coded(one, codec, average=False) if codec else core.all_reduce(one)
        elif call.op == "reduce_scatter" and codec:
            core.reduce_scatter_coded(many, one, codec, average=False)
        elif call.op == "reduce_scatter":
            core.reduce_scatter(many, one)
        elif call.op == "all_gather":
            core.all_gather(one, many)
        elif call.op == "all_to_all":
            core.all_to_all(list(many), list(out))
        elif call.op == "broadcast":
            core.broadcast(one, call.root)
        elif call.op == "scatter":
            core.scatter(many, one, call.root)
        else:
            took = core.recv(out, (self.rank - 1) % self.ranks)
            gave = core.send(one, (self.rank + 1) % self.ranks)
            took.wait()
            gave.wait()

    def abort(self, reason: str) -> None:
        self._core.abort(reason)

    def close(self) -> None:
        self._core.close()


class TorchGroup(Group):
    """A process group of torch. It makes calls without codecs."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def _run(self, call: Call, one: Any, many: Any, out: Any, async_op: bool) -> None:
        import torch
        import torch.distributed as dist

        one, many, out = map(torch.from_numpy, (one, many, out))
        group = self._group
        how: dict[str, Any] = {"group": group, "async_op": async_op}
        calls = {
            "all_reduce": lambda: [dist.all_reduce(one, **how)],
            "reduce_scatter": lambda: [dist.reduce_scatter_tensor(one, many.view(-1), **how)],
            "all_gather": lambda: [dist.all_gather_into_tensor(many.view(-1), one, **how)],
            "all_to_all": lambda: [dist.all_to_all_single(out, many, **how)],
            "broadcast": lambda: [dist.broadcast(one, group_src=call.root, **how)],
            "scatter": lambda: [
                dist.scatter(
                    one, [*many] if self.rank == call.root else None, group_src=call.root, **how
                )
            ],
            "send_recv": lambda: [
                dist.irecv(out, group_src=(self.rank - 1) % self.ranks, group=group),
                dist.isend(one, group_dst=(self.rank + 1) % self.ranks, group=group),
            ],
        }
        for work in calls[call.op]():
            if work is not None:
                work.wait()

    def set_timeout(self, seconds: float) -> None:
        self._backend().set_timeout(timedelta(seconds=seconds))

    def abort(self, reason: str) -> None:
        self._backend().abort()

    def _backend(self) -> Any:
        from pycomm import backend

        return backend.find(self._group)
