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

from pycomm import _C

Array = np.ndarray[Any, Any]
Inputs = Callable[[int], Array]  # maps a rank to its input, in float64
Run = Callable[[], Any]

# The dtype's name in pycomm, and a numpy type of the same width (numpy has no bfloat16).
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
# nccl-tests' names.
ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
REDUCTIONS = ("sum", "avg", "prod", "min", "max")


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
    def itemsize(self) -> int:
        return np.dtype(STORAGE[self.dtype]).itemsize

    @property
    def size(self) -> int:
        """Return the bytes of the larger buffer, from which rates are computed."""
        return self.count * self.itemsize * max(self.op.parts(self.ranks))

    @property
    def core_dtype(self) -> _C.DType:
        return _C.DType.__members__[self.dtype]

    @property
    def core_redop(self) -> _C.ReduceOp:
        return _C.ReduceOp.__members__[self.redop]

    def buffers(self, allocate: Callable[[int], Array] | None = None) -> tuple[Array, Array]:
        """Return zeroed, resident input and output arrays; one if it is in place."""

        def zeros(parts: int) -> Array:
            numel = parts * self.count
            array = allocate(numel) if allocate else np.empty(numel, STORAGE[self.dtype])
            array[:] = 0
            return array

        first, second = self.op.parts(self.ranks)
        x = zeros(first)
        return (x, x) if self.op.in_place else (x, zeros(second))

    def inputs(self, rank: int) -> Array:
        """Return small integers, whose sums every dtype holds exactly in any order."""
        place = np.arange(self.op.parts(self.ranks)[0] * self.count)
        values = (place * 7 + rank * 5) % 8
        return (values % 2 + 1 if self.redop == "prod" else values).astype(np.float64)

    def stored(self, values: Array) -> Array:
        """Convert float64 values to this dtype."""
        if self.dtype != "bfloat16":
            return values.astype(STORAGE[self.dtype])
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def values(self, stored: Array) -> Array:
        """Convert stored values to float64."""
        if self.dtype != "bfloat16":
            return stored.astype(np.float64)
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def expected(self) -> Array:
        return self.stored(self.op.expected(self, self.inputs))

    def reduced(self, inputs: Inputs) -> Array:
        """Return the reduction of all ranks' inputs, in float64."""
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
    """A collective, as nccl-tests describes it."""

    name: str
    bus_factor: Callable[[int], float]
    """bytes that cross each rank's link, over bytes of `Case.size`, by number of ranks"""
    parts: Callable[[int], tuple[int, int]]
    """input and output in units of `Case.count`, by number of ranks"""
    expected: Callable[[Case, Inputs], Array]
    torch: Callable[[Any, Any, Case, Any, Any], Run]
    """makes a call from torch.distributed, group, case, input and output tensor"""
    in_place: bool = False
    """it has one buffer"""
    reduces: bool = False
    root: int = -1
    to_root: bool = False
    """only rank 0 has a result"""
    core: Callable[[_C.Communicator, Case, Array, Array], Run] | None = None
    """makes a call of the core that is not `run` of its name"""


class BackendCalls(ABC):
    """One way to run every operation of :mod:`pycomm.bench.ops.operations`."""

    name: str
    coded: Sequence[str] = ()
    """names of the operations that it runs with a codec"""

    def buffers(self, case: Case) -> tuple[Any, Any]:
        """Return zeroed input and output buffers for `case`; the same one if it is in place."""
        return case.buffers()

    def fill(self, buffer: Any, stored: Array) -> None:
        """Put stored values into a buffer."""
        buffer[:] = stored

    def stored(self, case: Case, buffer: Any) -> Array:
        """Return the stored values of a buffer of a case."""
        return buffer

    def refuses(self, case: Case) -> str:
        """Return why this backend cannot run the case; empty if it can."""
        return ""

    @abstractmethod
    def prepare(self, case: Case, x: Any, y: Any, codec: str = "none") -> Run:
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
