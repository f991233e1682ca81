"""Groups of ranks as the cases use them: pycomm without torch, and process groups of torch.

Their `call` returns whether the result is right.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycomm.communicator import Communicator, Store
from tests.faults.injection.case import Call


def expected(call: Call, rank: int, ranks: int) -> Any:
    """Return a call's result where every rank r gives r + 1, and in an all_to_all 10 r + part."""
    if call.op in ("all_reduce", "reduce_scatter"):
        return ranks * (ranks + 1) / 2
    if call.op == "all_gather":
        return np.arange(1, ranks + 1)[:, None]
    if call.op == "all_to_all":
        return (10 * np.arange(ranks) + rank)[:, None]
    return call.root + 1 if call.op == "broadcast" else (rank - 1) % ranks + 1


@dataclass(frozen=True)
class Place:
    """The rendezvous of a rank with the others of a group."""

    folder: str
    name: str
    rank: int
    ranks: int
    transport: str
    timeout: float
    """seconds"""
    apart: bool = False
    """each rank acts as a host of its own: no rank sees another's process"""

    @property
    def nodes(self) -> list[int]:
        """Return the declared hosts of the ranks: two if transports are mixed, else none."""
        hosts = self.ranks if self.apart else 2 if self.transport == "auto" else 0
        return [rank * hosts // self.ranks for rank in range(self.ranks)] if hosts else []


class CoreGroup:
    """A `Communicator`. Async calls run on another thread, as in a process group."""

    def __init__(self, place: Place, parent: CoreGroup | None = None) -> None:
        self.rank, self.ranks = place.rank, place.ranks
        self.completed = 0
        self.in_heap = False
        """calls use memory that peers can access"""
        self.arrays: list[Any] = []
        """the arrays of the last such call"""
        self._core = Communicator(
            Store.file(place.folder),
            place.rank,
            place.ranks,
            group=place.name,
            transport=place.transport,
            timeout=place.timeout,
            parent=parent and parent._core,
            nodes=place.nodes,
        )
        self.describe = self._core.describe

    def set_timeout(self, seconds: float) -> None:
        self._core.timeout = seconds

    def call(self, call: Call, async_op: bool) -> bool:
        if not async_op:
            right = self._call(call)
        else:
            outcome: list[Any] = []

            def run() -> None:
                try:
                    outcome.append(self._call(call))
                except BaseException as error:
                    outcome.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            if isinstance(outcome[0], BaseException):
                raise outcome[0]
            right = outcome[0]
        self.completed += call.op != "send_recv"
        return right

    def _call(self, call: Call) -> bool:
        core, rank, ranks, codec = self._core, self.rank, self.ranks, call.codec
        one = self._full((call.numel,), rank + 1)
        many = self._full((ranks, call.numel), rank + 1)
        if self.in_heap:
            self.arrays = [one, many]
        out = one
        if call.op == "all_reduce":
            core.all_reduce_coded(one, codec, average=False) if codec else core.all_reduce(one)
        elif call.op == "reduce_scatter":
            if codec:
                core.reduce_scatter_coded(many, one, codec, average=False)
            else:
                core.reduce_scatter(many, one)
        elif call.op == "all_gather":
            core.all_gather_coded(one, many, codec) if codec else core.all_gather(one, many)
            out = many
        elif call.op == "all_to_all":
            many[:] = (10 * rank + np.arange(ranks))[:, None]
            out = np.empty_like(many)
            core.all_to_all(list(many), list(out))
        elif call.op == "broadcast":
            core.broadcast(one, call.root)
        else:
            out = np.empty_like(one)
            took = core.recv(out, (rank - 1) % ranks)
            gave = core.send(one, (rank + 1) % ranks)
            took.wait()
            gave.wait()
        if codec:  # codec errors are not tested here
            return bool(np.isfinite(out).all())
        return bool((out == expected(call, rank, ranks)).all())

    def _full(self, shape: tuple[int, ...], value: float) -> Any:
        if not self.in_heap:
            return np.full(shape, value, np.float32)
        array = np.asarray(self._core.allocate(int(np.prod(shape)))).reshape(shape)
        array[:] = value
        return array

    def abort(self, reason: str) -> None:
        self._core.abort(reason)

    def close(self) -> None:
        self._core.close()


class TorchGroup:
    """A process group of torch. It makes calls without codecs."""

    def __init__(self, group: Any) -> None:
        self.rank, self.ranks, self.completed = group.rank(), group.size(), 0
        self._group = group

    def call(self, call: Call, async_op: bool) -> bool:
        import torch
        import torch.distributed as dist

        group, rank, ranks = self._group, self.rank, self.ranks
        one = torch.full((call.numel,), float(rank + 1))
        many = torch.full((ranks, call.numel), float(rank + 1))
        out, works = one, []
        if call.op == "all_reduce":
            works = [dist.all_reduce(one, group=group, async_op=async_op)]
        elif call.op == "reduce_scatter":
            works = [dist.reduce_scatter_tensor(one, many.view(-1), group=group, async_op=async_op)]
        elif call.op == "all_gather":
            works = [
                dist.all_gather_into_tensor(many.view(-1), one, group=group, async_op=async_op)
            ]
            out = many
        elif call.op == "all_to_all":
            many[:] = (10.0 * rank + torch.arange(ranks))[:, None]
            out = torch.empty_like(many)
            works = [dist.all_to_all_single(out, many, group=group, async_op=async_op)]
        elif call.op == "broadcast":
            works = [dist.broadcast(one, group_src=call.root, group=group, async_op=async_op)]
        else:
            out = torch.empty_like(one)
            works = [
                dist.irecv(out, group_src=(rank - 1) % ranks, group=group),
                dist.isend(one, group_dst=(rank + 1) % ranks, group=group),
            ]
        for work in works:
            if work is not None:
                work.wait()
        self.completed += call.op != "send_recv"
        return bool((out.numpy() == expected(call, rank, ranks)).all())
