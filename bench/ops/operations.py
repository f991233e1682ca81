"""The operations that `pycomm.bench` can run: sizes, bus factors, right results, and the calls.

A new operation is one entry of :data:`OPERATIONS`. The bus factors are derived in docs/bench.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pycomm import _C
from pycomm.bench.ops.cases import Case, Inputs, Operation, Run

# `torch` takes torch.distributed, a group, a case, and the input and output tensor, and returns a
# callable that runs the operation once; so does `core`, of a communicator and tensors, where the
# core has no collective of that name.


def _redop(dist: Any, case: Case) -> Any:
    names = {"prod": "PRODUCT"}
    return getattr(dist.ReduceOp, names.get(case.redop, case.redop.upper()))


def _single(dist: Any, name: str, old: str) -> Any:
    """Return the function that torch 2.13 renamed, or the old one; the old names warn there."""
    return getattr(dist, name, None) or getattr(dist, old)


def _torch_reduce(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    op = _redop(dist, case)

    def run() -> None:  # torch's call is in place, so the copy preserves the input
        y.copy_(x)
        dist.reduce(y, 0, op, group)

    return run


def _chunks(case: Case, tensor: Any) -> list[Any] | None:
    return list(tensor.chunk(case.ranks)) if case.rank == 0 else None


def _neighbours(case: Case) -> tuple[int, int]:
    return (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks


def _core_sendrecv(c: _C.Communicator, case: Case, x: Tensor, y: Tensor) -> Run:
    (after, before), source, target = _neighbours(case), x.data_ptr(), y.data_ptr()

    def run() -> None:
        receive = c.recv(target, x.nbytes, before)
        send = c.send(source, x.nbytes, after)
        send.wait()
        receive.wait()

    return run


def _torch_sendrecv(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    after, before = _neighbours(case)

    def run() -> None:
        receive = dist.irecv(y, before, group)
        send = dist.isend(x, after, group)
        send.wait()
        receive.wait()

    return run


def _shares(ranks: int) -> float:
    return (ranks - 1) / ranks


def _all(case: Case, inputs: Inputs) -> Tensor:
    return torch.cat([inputs(rank) for rank in range(case.ranks)])


def _one_each(ranks: int) -> tuple[int, int]:
    return 1, 1


_LIST = (
    Operation(
        name="all_reduce",
        bus_factor=lambda ranks: 2 * _shares(ranks),
        parts=_one_each,
        in_place=True,
        expected=lambda case, inputs: case.reduced(inputs),
        torch=lambda dist, group, case, x, y: partial(
            dist.all_reduce, x, _redop(dist, case), group
        ),
        reduces=True,
    ),
    Operation(
        name="reduce_scatter",
        bus_factor=_shares,
        parts=lambda ranks: (ranks, 1),
        expected=lambda case, inputs: case.part(case.reduced(inputs), case.rank),
        torch=lambda dist, group, case, x, y: partial(
            _single(dist, "reduce_scatter_single", "reduce_scatter_tensor"),
            *(y, x, _redop(dist, case), group),
        ),
        reduces=True,
    ),
    Operation(
        name="all_gather",
        bus_factor=_shares,
        parts=lambda ranks: (1, ranks),
        expected=_all,
        torch=lambda dist, group, case, x, y: partial(
            _single(dist, "all_gather_single", "all_gather_into_tensor"), y, x, group
        ),
    ),
    Operation(
        name="broadcast",
        root=0,
        bus_factor=lambda ranks: 1.0,
        parts=_one_each,
        in_place=True,
        expected=lambda case, inputs: inputs(0),
        torch=lambda dist, group, case, x, y: partial(dist.broadcast, x, 0, group),
    ),
    Operation(
        name="reduce",
        root=0,
        bus_factor=lambda ranks: 1.0,
        parts=_one_each,
        expected=lambda case, inputs: case.reduced(inputs),
        torch=_torch_reduce,
        reduces=True,
        to_root=True,
    ),
    Operation(
        name="all_to_all",
        bus_factor=_shares,
        parts=lambda ranks: (ranks, ranks),
        expected=lambda case, inputs: torch.cat(
            [case.part(inputs(rank), case.rank) for rank in range(case.ranks)]
        ),
        torch=lambda dist, group, case, x, y: partial(dist.all_to_all_single, y, x, group=group),
    ),
    Operation(
        name="gather",
        root=0,
        bus_factor=_shares,
        parts=lambda ranks: (1, ranks),
        expected=_all,
        torch=lambda dist, group, case, x, y: partial(dist.gather, x, _chunks(case, y), 0, group),
        to_root=True,
    ),
    Operation(
        name="scatter",
        root=0,
        bus_factor=_shares,
        parts=lambda ranks: (ranks, 1),
        expected=lambda case, inputs: case.part(inputs(0), case.rank),
        torch=lambda dist, group, case, x, y: partial(dist.scatter, y, _chunks(case, x), 0, group),
    ),
    Operation(
        name="sendrecv",
        bus_factor=lambda ranks: 1.0,
        parts=_one_each,
        expected=lambda case, inputs: inputs((case.rank - 1) % case.ranks),
        core=_core_sendrecv,
        torch=_torch_sendrecv,
    ),
)
OPERATIONS = {op.name: op for op in _LIST}


def make_case(
    op: Operation, size: int, *, dtype: str, redop: str, rank: int, ranks: int
) -> Case | None:
    """Return the largest case of at most `size` bytes; None if it is empty."""
    unit = getattr(torch, dtype).itemsize * max(op.parts(ranks))
    count = size // unit
    return Case(op, count, dtype, redop if op.reduces else "", rank, ranks) if count else None
