"""The operations that `pycomm.bench` can run: sizes, bus factors, right results, and the calls.

A new operation is one entry of :data:`OPERATIONS`. The bus factors are derived in docs/bench.md.
"""

from __future__ import annotations

import numpy as np

from pycomm import _C
from pycomm.bench.ops import torch_calls
from pycomm.bench.ops.cases import STORAGE, Array, Case, Inputs, Operation, Run


def _address(array: Array) -> int:
    return int(array.ctypes.data)


def _core_all_reduce(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_address(x), case.count, case.core_dtype, case.core_redop)
    return lambda: c.all_reduce(*args)


def _core_reduce_scatter(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_address(x), _address(y), case.count, case.core_dtype, case.core_redop)
    return lambda: c.reduce_scatter(*args)


def _core_all_gather(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_address(x), _address(y), case.count, case.core_dtype)
    return lambda: c.all_gather(*args)


def _core_broadcast(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_address(x), case.count, case.core_dtype, 0)
    return lambda: c.broadcast(*args)


def _core_reduce(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_address(x), _address(y), case.count, case.core_dtype, case.core_redop, 0)
    return lambda: c.reduce(*args)


def _parts(case: Case, array: Array) -> _C.Parts:
    step = array.nbytes // case.ranks
    return _C.Parts([(_address(array) + r * step, case.count) for r in range(case.ranks)])


def _core_all_to_all(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_parts(case, x), _parts(case, y), case.core_dtype)
    return lambda: c.all_to_all(*args)


def _core_gather(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_address(x), case.count, _parts(case, y), case.core_dtype, 0)
    return lambda: c.gather(*args)


def _core_scatter(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    args = (_parts(case, x), _address(y), case.count, case.core_dtype, 0)
    return lambda: c.scatter(*args)


def _core_sendrecv(c: _C.Communicator, case: Case, x: Array, y: Array) -> Run:
    after, before = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
    source, target = _address(x), _address(y)

    def run() -> None:
        receive = c.recv(target, x.nbytes, before)
        send = c.send(source, x.nbytes, after)
        send.wait()
        receive.wait()

    return run


def _shares(ranks: int) -> float:
    return (ranks - 1) / ranks


def _all_to_all_expected(case: Case, inputs: Inputs) -> Array:
    return np.concatenate([case.part(inputs(r), case.rank) for r in range(case.ranks)])


OPERATIONS = {
    op.name: op
    for op in (
        Operation(
            name="all_reduce",
            bus_factor=lambda ranks: 2 * _shares(ranks),
            parts=lambda ranks: (1, 1),
            in_place=True,
            expected=lambda case, inputs: case.reduced(inputs),
            core=_core_all_reduce,
            torch=torch_calls.all_reduce,
            reduces=True,
        ),
        Operation(
            name="reduce_scatter",
            bus_factor=_shares,
            parts=lambda ranks: (ranks, 1),
            in_place=False,
            expected=lambda case, inputs: case.part(case.reduced(inputs), case.rank),
            core=_core_reduce_scatter,
            torch=torch_calls.reduce_scatter,
            reduces=True,
        ),
        Operation(
            name="all_gather",
            bus_factor=_shares,
            parts=lambda ranks: (1, ranks),
            in_place=False,
            expected=lambda case, inputs: np.concatenate([inputs(r) for r in range(case.ranks)]),
            core=_core_all_gather,
            torch=torch_calls.all_gather,
        ),
        Operation(
            name="broadcast",
            bus_factor=lambda ranks: 1.0,
            parts=lambda ranks: (1, 1),
            in_place=True,
            expected=lambda case, inputs: inputs(0),
            core=_core_broadcast,
            torch=torch_calls.broadcast,
        ),
        Operation(
            name="reduce",
            bus_factor=lambda ranks: 1.0,
            parts=lambda ranks: (1, 1),
            in_place=False,
            expected=lambda case, inputs: case.reduced(inputs),
            core=_core_reduce,
            torch=torch_calls.reduce,
            reduces=True,
            to_root=True,
        ),
        Operation(
            name="all_to_all",
            bus_factor=_shares,
            parts=lambda ranks: (ranks, ranks),
            in_place=False,
            expected=_all_to_all_expected,
            core=_core_all_to_all,
            torch=torch_calls.all_to_all,
        ),
        Operation(
            name="gather",
            bus_factor=_shares,
            parts=lambda ranks: (1, ranks),
            in_place=False,
            expected=lambda case, inputs: np.concatenate([inputs(r) for r in range(case.ranks)]),
            core=_core_gather,
            torch=torch_calls.gather,
            to_root=True,
        ),
        Operation(
            name="scatter",
            bus_factor=_shares,
            parts=lambda ranks: (ranks, 1),
            in_place=False,
            expected=lambda case, inputs: case.part(inputs(0), case.rank),
            core=_core_scatter,
            torch=torch_calls.scatter,
        ),
        Operation(
            name="sendrecv",
            bus_factor=lambda ranks: 1.0,
            parts=lambda ranks: (1, 1),
            in_place=False,
            expected=lambda case, inputs: inputs((case.rank - 1) % case.ranks),
            core=_core_sendrecv,
            torch=torch_calls.sendrecv,
        ),
    )
}


def make_case(
    op: Operation, size: int, *, dtype: str, redop: str, rank: int, ranks: int
) -> Case | None:
    """Return the largest case of at most `size` bytes; None if it is empty."""
    unit = np.dtype(STORAGE[dtype]).itemsize * max(op.parts(ranks))
    count = size // unit
    return Case(op, count, dtype, redop if op.reduces else "", rank, ranks) if count else None
