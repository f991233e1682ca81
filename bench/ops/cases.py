"""One operation at one size, its buffers, inputs and right results; and what runs it.

`operations.py` has the operations, `backends.py` what runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
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


@dataclass(frozen=True)
class Operation:
    """A collective, as nccl-tests describes it."""

    name: str
    bus_factor: Callable[[int], float]
    """bytes that cross each rank's link, over bytes of `Case.size`, by number of ranks"""
    parts: Callable[[int], tuple[int, int]]
    """input and output in units of `Case.count`, by number of ranks"""
    expected: Callable[[Case, Inputs], Tensor]
    torch: Callable[[Any, Any, Case, Any, Any], Run]
    """makes a call from torch.distributed, group, case, input and output tensor"""
    in_place: bool = False
    """it has one buffer"""
    reduces: bool = False
    root: int = -1
    to_root: bool = False
    """only rank 0 has a result"""
    core: Callable[[_C.Communicator, Case, Tensor, Tensor], Run] | None = None
    """makes a call of the core that is not `run` of its name"""


class BackendCalls(ABC):
    """One way to run every operation of :mod:`pycomm.bench.ops.operations`."""

    name: str
    coded: Sequence[str] = ()
    """names of the operations that it runs with a codec"""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a buffer."""
        return empty(numel, dtype)

    def refuses(self, case: Case) -> str:
        """Return why this backend cannot run the case; empty if it can."""
        return ""

    @abstractmethod
    def prepare(self, case: Case, x: Tensor, y: Tensor, codec: str = "none") -> Run:
        """Return a callable that runs the operation once, from `x` to `y`, with all set-up done."""

    def event_time(self, run: Run) -> float | None:
        """Return the median of the calls of what `prepare` has returned, by the device's own clock,
        in us; None: it has none."""
        return None

    @abstractmethod
    def sent_bytes(self) -> int | None:
        """Return the bytes this rank has sent since the start; None if they are not counted."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def close(self) -> None: ...
