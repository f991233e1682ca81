"""The operations that `pycomm.bench` can run: sizes, bus factors, right results, and the calls.

A new operation is one entry of :data:`OPERATIONS`. The bus factors are derived in docs/bench.md. A
case is one operation at one size, with its buffers; backends.py has what runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pycomm import _C

Inputs = Callable[[int], Tensor]  # maps a rank to its input, in float64
Run = Callable[[], Any]

DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
)
"""by their names in torch and in the core"""
# nccl-tests' names.
ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
REDUCTIONS = ("sum", "avg", "prod", "min", "max")


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory of the CPU: numpy asks for huge pages, which alone are worth a quarter."""
    return torch.from_numpy(np.empty(numel * dtype.itemsize, np.uint8)).view(dtype)


@dataclass(frozen=True)
class Case:
    """One operation at one size, as one rank sees it. `count` has nccl-tests' meaning."""

    op: Operation
    count: int
    dtype: str
    redop: str
    rank: int
    ranks: int

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def size(self) -> int:
        """Return the bytes of the larger buffer, from which rates are computed."""
        return self.count * self.type.itemsize * max(self.op.parts(self.ranks))

    @property
    def core_dtype(self) -> _C.DType:
        return _C.DType.__members__[self.dtype]

    @property
    def core_redop(self) -> _C.ReduceOp:
        return _C.ReduceOp.__members__[self.redop]

    def buffers(
        self, allocate: Callable[[int, torch.dtype], Tensor] = empty
    ) -> tuple[Tensor, Tensor]:
        """Return zeroed, resident input and output tensors; one if it is in place."""

        def zeros(parts: int) -> Tensor:
            tensor = allocate(parts * self.count, self.type)
            tensor.view(torch.uint8).zero_()
            return tensor

        first, second = self.op.parts(self.ranks)
        x = zeros(first)
        return (x, x) if self.op.in_place else (x, zeros(second))

    def inputs(self, rank: int) -> Tensor:
        """Return small integers, whose sums every dtype holds exactly in any order."""
        place = torch.arange(self.op.parts(self.ranks)[0] * self.count)
        values = (place * 7 + rank * 5) % 8
        return (values % 2 + 1 if self.redop == "prod" else values).double()

    def expected(self) -> Tensor:
        """Return the right result, of this type."""
        return self.op.expected(self, self.inputs).to(self.type)

    def reduced(self, inputs: Inputs) -> Tensor:
        """Return the reduction of all ranks' inputs, in float64."""
        functions = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
        function = functions.get(self.redop, torch.add)
        total = reduce(function, (inputs(rank) for rank in range(self.ranks)))
        if self.redop != "avg":
            return total
        if not self.type.is_floating_point:
            return (total / self.ranks).trunc()
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        return (total.to(wide) / self.ranks).double()

    def part(self, values: Tensor, rank: int) -> Tensor:
        return values[rank * self.count : (rank + 1) * self.count]


def _one_each(ranks: int) -> tuple[int, int]:
    return 1, 1


def _shares(ranks: int) -> float:
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Operation:
    """A collective, as nccl-tests describes it."""

    name: str
    expected: Callable[[Case, Inputs], Tensor]
    torch: Callable[[Any, Case, Tensor, Tensor], Run]
    """makes a call of torch.distributed from a group, case, input and output tensor"""
    bus_factor: Callable[[int], float] = lambda ranks: 1.0
    """bytes that cross each rank's link, over bytes of `Case.size`, by number of ranks"""
    parts: Callable[[int], tuple[int, int]] = _one_each
    """input and output in units of `Case.count`, by number of ranks"""
    in_place: bool = False
    """it has one buffer"""
    reduces: bool = False
    root: int = -1
    to_root: bool = False
    """only rank 0 has a result"""


def _redop(case: Case) -> Any:
    names = {"prod": "PRODUCT"}
    return getattr(dist.ReduceOp, names.get(case.redop, case.redop.upper()))


def _single(name: str, old: str) -> Any:
    """Return the function that torch 2.13 renamed, or the old one; the old names warn there."""
    return getattr(dist, name, None) or getattr(dist, old)


def _torch_reduce(group: Any, case: Case, x: Tensor, y: Tensor) -> Run:
    op = _redop(case)

    def run() -> None:  # torch's call is in place, so the copy preserves the input
        y.copy_(x)
        dist.reduce(y, 0, op, group)

    return run


def _chunks(case: Case, tensor: Any) -> list[Any] | None:
    return list(tensor.chunk(case.ranks)) if case.rank == 0 else None


def neighbours(case: Case) -> tuple[int, int]:
    """Return the ranks to which and from which sendrecv moves values."""
    return (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks


def sendrecv(send: Callable[[], Any], receive: Callable[[], Any]) -> Run:
    """Return a call that does both at once; each returns what is waited for."""

    def run() -> None:
        received = receive()
        send().wait()
        received.wait()

    return run


def _torch_sendrecv(group: Any, case: Case, x: Tensor, y: Tensor) -> Run:
    after, before = neighbours(case)
    return sendrecv(partial(dist.isend, x, after, group), partial(dist.irecv, y, before, group))


def _all(case: Case, inputs: Inputs) -> Tensor:
    return torch.cat([inputs(rank) for rank in range(case.ranks)])


_LIST = (
    Operation(
        name="all_reduce",
        bus_factor=lambda ranks: 2 * _shares(ranks),
        in_place=True,
        expected=lambda case, inputs: case.reduced(inputs),
        torch=lambda group, case, x, y: partial(dist.all_reduce, x, _redop(case), group),
        reduces=True,
    ),
    Operation(
        name="reduce_scatter",
        bus_factor=_shares,
        parts=lambda ranks: (ranks, 1),
        expected=lambda case, inputs: case.part(case.reduced(inputs), case.rank),
        torch=lambda group, case, x, y: partial(
            _single("reduce_scatter_single", "reduce_scatter_tensor"),
            *(y, x, _redop(case), group),
        ),
        reduces=True,
    ),
    Operation(
        name="all_gather",
        bus_factor=_shares,
        parts=lambda ranks: (1, ranks),
        expected=_all,
        torch=lambda group, case, x, y: partial(
            _single("all_gather_single", "all_gather_into_tensor"), y, x, group
        ),
    ),
    Operation(
        name="broadcast",
        root=0,
        in_place=True,
        expected=lambda case, inputs: inputs(0),
        torch=lambda group, case, x, y: partial(dist.broadcast, x, 0, group),
    ),
    Operation(
        name="reduce",
        root=0,
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
        torch=lambda group, case, x, y: partial(dist.all_to_all_single, y, x, group=group),
    ),
    Operation(
        name="gather",
        root=0,
        bus_factor=_shares,
        parts=lambda ranks: (1, ranks),
        expected=_all,
        torch=lambda group, case, x, y: partial(dist.gather, x, _chunks(case, y), 0, group),
        to_root=True,
    ),
    Operation(
        name="scatter",
        root=0,
        bus_factor=_shares,
        parts=lambda ranks: (ranks, 1),
        expected=lambda case, inputs: case.part(inputs(0), case.rank),
        torch=lambda group, case, x, y: partial(dist.scatter, y, _chunks(case, x), 0, group),
    ),
    Operation(
        name="sendrecv",
        expected=lambda case, inputs: inputs((case.rank - 1) % case.ranks),
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
