"""The operations that `pycomm.bench` can run: sizes, bus factors, right results, and the calls.

A new operation is one entry of :data:`OPERATIONS`. The bus factors are derived in docs/bench.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from pycomm import _C
from pycomm.bench import torch_calls

Array = np.ndarray[Any, Any]
Inputs = Callable[[int], Array]  # a rank's input, in float64
Run = Callable[[], None]

# Name in pycomm, and the numpy type that has its bits (numpy has no bfloat16).
STORAGE = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
}
# nccl-tests' words.
ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
REDUCTIONS = ("sum", "avg", "prod", "min", "max")


@dataclass(frozen=True)
class Case:
    """One operation at one size, as one rank sees it. `count` is what nccl-tests calls so."""

    op: Operation
    count: int
    dtype: str
    redop: str
    rank: int
    ranks: int

    @property
    def itemsize(self) -> int:
        return np.dtype(STORAGE[self.dtype]).itemsize

    @property
    def size(self) -> int:
        """Bytes of the larger buffer: the size that rates are computed from."""
        return self.count * self.itemsize * max(self.op.parts(self.ranks))

    @property
    def core_dtype(self) -> _C.DType:
        return _C.DType.__members__[self.dtype]

    @property
    def core_redop(self) -> _C.ReduceOp:
        return _C.ReduceOp.__members__[self.redop]

    def buffers(self, allocate: Callable[[int], Array] | None = None) -> tuple[Array, Array]:
        """Input and output, of zeros that are really there; one array where the op is in place."""

        def zeros(parts: int) -> Array:
            numel = parts * self.count
            array = allocate(numel) if allocate else np.empty(numel, STORAGE[self.dtype])
            array[:] = 0
            return array

        first, second = self.op.parts(self.ranks)
        x = zeros(first)
        return (x, x) if self.op.in_place else (x, zeros(second))

    def inputs(self, rank: int) -> Array:
        """Small integers: every type holds them and their sums exactly, in whatever order."""
        place = np.arange(self.op.parts(self.ranks)[0] * self.count)
        values = (place * 7 + rank * 5) % 8
        return (values % 2 + 1 if self.redop == "prod" else values).astype(np.float64)

    def stored(self, values: Array) -> Array:
        """Values of float64 in this dtype."""
        if self.dtype != "bfloat16":
            return values.astype(STORAGE[self.dtype])
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def values(self, stored: Array) -> Array:
        """What is stored, in float64."""
        if self.dtype != "bfloat16":
            return stored.astype(np.float64)
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def expected(self) -> Array:
        return self.stored(self.op.expected(self, self.inputs))

    def reduced(self, inputs: Inputs) -> Array:
        """The reduction of all ranks' inputs, in float64."""
        functions = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}
        function = functions.get(self.redop, np.add)
        total = reduce(function, (inputs(rank) for rank in range(self.ranks)))
        if self.redop != "avg":
            return total
        if np.issubdtype(STORAGE[self.dtype], np.integer) and self.dtype != "bfloat16":
            return np.trunc(total / self.ranks)
        wide = np.float64 if self.dtype == "float64" else np.float32
        return (total.astype(wide) / wide(self.ranks)).astype(np.float64)

    def part(self, values: Array, rank: int) -> Array:
        return values[rank * self.count : (rank + 1) * self.count]


@dataclass(frozen=True)
class Operation:
    """What nccl-tests calls a collective."""

    name: str
    bus_factor: Callable[[int], float]
    """bytes that cross each rank's link, over bytes of `Case.size`, by number of ranks"""
    parts: Callable[[int], tuple[int, int]]
    """input and output in units of `Case.count`, by number of ranks"""
    in_place: bool
    expected: Callable[[Case, Inputs], Array]
    core: Callable[[_C.Communicator, Case, Array, Array], Run]
    torch: Callable[[Any, Any, Case, Any, Any], Run]
    """of torch.distributed, group, case, input and output tensor"""
    reduces: bool = False
    to_root: bool = False
    """only rank 0 has a result"""


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
    """The case nearest below `size` bytes; None if that leaves nothing."""
    unit = np.dtype(STORAGE[dtype]).itemsize * max(op.parts(ranks))
    count = size // unit
    return Case(op, count, dtype, redop if op.reduces else "", rank, ranks) if count else None
