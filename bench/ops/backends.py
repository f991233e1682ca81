"""Backends of the benchmark: pycomm's core and backends of torch.distributed, in one process.

`pycomm` is the core without torch. `pycomm:ring` and the like fix the algorithm, and `pycomm-tls`
encrypts connections. `pycomm-torch` is pycomm's backend of torch.distributed, and `gloo` is torch's
own. Backends with `-shared` work on memory that the group has allocated, so that peers access it in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.bench.ops import coded
from pycomm.bench.ops.cases import BackendCalls, Case, Run

CORE = ("pycomm", "pycomm-shared", "pycomm-tls")
NAMES = (
    *CORE,
    *("pycomm-torch", "pycomm-torch-shared", "gloo"),
    *(f"pycomm:{algo}" for algo in _C.ALGOS),
)


class Core(BackendCalls):
    coded = coded.CORE

    def __init__(self, name: str, store: _C.Store, rank: int, ranks: int) -> None:
        self.name = name
        options = _C.CommunicatorOptions()
        options.group = f"bench-{name}"
        if ":" in name:
            options.algo = name.partition(":")[2]
        if name == "pycomm-tls":
            options.tls = "on"
        self.communicator: _C.Communicator = _C.Communicator(store, rank, ranks, options)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.name != "pycomm-shared":
            return super().allocate(numel, dtype)
        memory = self.communicator.allocate(numel * dtype.itemsize, _C.DType.uint8)
        return torch.frombuffer(memory, dtype=dtype)

    def prepare(self, case: Case, x: torch.Tensor, y: torch.Tensor, codec: str = "none") -> Run:
        op = case.op
        if codec != "none":
            buffers, pieces = (x.data_ptr(), y.data_ptr()), _pieces(case, codec)
            coded_call = self.communicator.run_coded
            return partial(coded_call, op.name, *buffers, pieces, dtype=case.core_dtype)
        if op.core is not None:
            return op.core(self.communicator, case, x, y)
        how = case.core_redop if op.reduces else _C.ReduceOp.sum
        call = op.name, x.data_ptr(), y.data_ptr(), case.count, case.core_dtype, how, op.root
        return partial(self.communicator.run, *call)

    def explain(self, case: Case, codec: str = "none") -> str:
        """Return which algorithm runs a case, and why."""
        pieces = None if codec == "none" else _pieces(case, codec)
        return self.communicator.explain(case.op.name, case.size, pieces, case.core_dtype)

    def sent_bytes(self) -> int:
        return self.communicator.sent_bytes()

    def describe(self) -> str:
        return self.communicator.describe()

    def close(self) -> None:
        del self.communicator


def _pieces(case: Case, codec: str) -> _C.Pieces:
    pieces = _C.Pieces()
    pieces.add(case.count, _C.Codec(codec))
    return pieces


ON_DEVICE = ("pycomm-torch", "pycomm-host", "nccl", "pycomm-nccl")
"""Those of `--device cuda`; see torch_backends.py."""


def usual() -> list[str]:
    """Return those of `--device cuda` that this torch has."""
    return [name for name in ON_DEVICE if "nccl" not in name or dist.is_nccl_available()]


def connect(
    names: Sequence[str], store: _C.Store, rank: int, ranks: int, *, cuda: bool = False
) -> list[BackendCalls]:
    """Connect to the other ranks in every backend, in the order of the names."""
    backends: list[BackendCalls] = []
    for name in names:
        if name.partition(":")[0] in CORE:
            backends.append(Core(name, store, rank, ranks))
        else:
            from pycomm.bench.ops.torch_backends import make

            backends.append(make(name, store, rank, ranks, cuda=cuda))
    return backends
