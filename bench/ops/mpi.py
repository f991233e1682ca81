"""An MPI library (Open MPI, MPICH, Intel MPI) as a backend of the benchmark, through mpi4py.

The ranks must be started by that library's `mpirun`; `python -m pycomm.bench` does so by itself
when `mpi` is among the backends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

from pycomm.bench.ops.backend import BackendCalls
from pycomm.bench.ops.cases import Array, Case, Run

# mpirun's own variables, by library: Open MPI, then libraries that start ranks with hydra.
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "uint32": "UINT32_T",
    "int64": "INT64_T",
    "uint64": "UINT64_T",
}


def started_by_mpirun() -> tuple[int, int] | None:
    """Return the rank and the number of ranks from mpirun's variables; None without mpirun."""
    for rank, size in zip(RANK, SIZE, strict=True):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return None


def mpirun(ranks: int) -> list[str]:
    """Return the command that starts `ranks` processes, even on fewer cores."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        return ["mpirun", "-n", str(ranks)]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # The benchmark pins the ranks itself, in the same way for all backends.
    return ["mpirun", *root, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


class Mpi(BackendCalls):
    """MPI through mpi4py's upper-case calls, which work directly on buffers."""

    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD

    def refuses(self, case: Case) -> str:
        if case.dtype not in TYPES:
            return f"MPI has no {case.dtype}"
        return "MPI has no avg" if case.redop == "avg" else ""

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        mpi, world = self._mpi, self._world
        kind = getattr(mpi, TYPES[case.dtype])
        op = getattr(mpi, case.redop.upper()) if case.redop else None
        before, after = (case.rank - 1) % case.ranks, (case.rank + 1) % case.ranks
        source, target = [x, x.size, kind], [y, y.size, kind]
        mine = [x, case.count, kind]
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, source, op),
            "reduce_scatter": lambda: world.Reduce_scatter_block(mine, target, op),
            "all_gather": lambda: world.Allgather(mine, [y, case.count, kind]),
            "broadcast": lambda: world.Bcast(source, 0),
            "reduce": lambda: world.Reduce(source, target if case.rank == 0 else None, op, 0),
            "all_to_all": lambda: world.Alltoall([x, case.count, kind], [y, case.count, kind]),
            "gather": lambda: world.Gather(mine, [y, case.count, kind], 0),
            "scatter": lambda: world.Scatter([x, case.count, kind], target, 0),
            "sendrecv": lambda: world.Sendrecv(source, after, 0, target, before, 0),
        }
        return calls[case.op.name]

    def sent_bytes(self) -> None:
        return None

    def describe(self) -> str:
        return str(self._mpi.Get_library_version().split("\n")[0].split(",")[0])

    def close(self) -> None:
        """Do nothing: mpi4py finalizes MPI when the process exits."""
