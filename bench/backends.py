"""Who runs a collective: pycomm's core, or backends of torch.distributed, in the same processes.

`pycomm` is the core without torch, `pycomm:ring` and the like the same with this algorithm,
`pycomm-tls` with encrypted connections, `pycomm-unchecked` without checksums of payloads;
`pycomm-torch` is a backend of torch, `gloo` and `nccl` its own, `mpi` whatever library mpirun
belongs to. Those with `-shared` work on memory that the group has allocated, so that peers address
it in place.
"""

from __future__ import annotations

import importlib.util
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pycomm import _C
from pycomm.bench import coded
from pycomm.bench.operations import Array, Case, Run

CORE = ("pycomm", "pycomm-shared", "pycomm-tls", "pycomm-unchecked")
NAMES = (
    *CORE,
    *("pycomm-torch", "pycomm-torch-shared", "gloo", "mpi", "nccl"),
    *(f"pycomm:{algo}" for algo in _C.ALGOS),
)


class Backend(ABC):
    """One way to run every operation of :mod:`pycomm.bench.operations`."""

    name: str
    has_codecs = False

    def buffers(self, case: Case) -> tuple[Array, Array]:
        """Zeros for the input and the output of `case`, which are one where it is in place."""
        return case.buffers()

    def refuses(self, case: Case) -> str:
        """Why this backend cannot do it; empty: it can."""
        return ""

    @abstractmethod
    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        """A call that does the operation once, from `x` to `y`. Only what it needs stays in it."""

    def load(self, x: Array, y: Array) -> None:
        """Bring buffers that were prepared to where the operation works."""
        return  # it works on them

    def fetch(self, x: Array, y: Array) -> None:
        """Bring them back."""
        return

    @abstractmethod
    def sent_bytes(self) -> int | None:
        """What this rank has sent since the start; None: not counted."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def close(self) -> None: ...


class Core(Backend):
    has_codecs = True

    def __init__(self, name: str, store: _C.Store, rank: int, ranks: int) -> None:
        self.name = name
        options = _C.CommunicatorOptions()
        options.group = f"bench-{name}"
        if ":" in name:
            options.algo = name.partition(":")[2]
        if name == "pycomm-tls":
            options.tls = True
        if name == "pycomm-unchecked":
            options.checksum = "header"
        self.communicator: _C.Communicator = _C.Communicator(store, rank, ranks, options)

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        if codec == "none":
            return case.op.core(self.communicator, case, x, y)
        return coded.core_run(self.communicator, case, x, y, codec)

    def sent_bytes(self) -> int:
        return self.communicator.sent_bytes()

    def describe(self) -> str:
        return self.communicator.describe()

    def close(self) -> None:
        del self.communicator


class SharedCore(Core):
    """The core on memory of its own allocate(), which peers read and write in place."""

    def buffers(self, case: Case) -> tuple[Array, Array]:
        return case.buffers(
            lambda numel: np.asarray(self.communicator.allocate(numel, case.core_dtype))
        )


def connect(names: Sequence[str], folder: Path, rank: int, ranks: int) -> list[Backend]:
    """Meet the other ranks in every backend, in the order of the names."""
    backends: list[Backend] = []
    for name in names:
        if name.partition(":")[0] in CORE:
            core = SharedCore if name == "pycomm-shared" else Core
            backends.append(core(name, _C.Store.file(str(folder)), rank, ranks))
        elif name == "mpi":
            from pycomm.bench.mpi import Mpi  # mpi4py starts MPI when it is imported

            backends.append(Mpi())
        else:
            from pycomm.bench.torch_backends import make

            backends.append(make(name, folder, rank, ranks))
    return backends


def missing(names: Sequence[str], ranks_here: int) -> str:
    """Why a backend cannot be used on this machine, and what to do; empty: all can."""
    with_torch = [name for name in names if name in ("gloo", "nccl") or "-torch" in name]
    if with_torch and importlib.util.find_spec("torch") is None:
        return f"--backend {with_torch[0]} needs torch, which is not installed here"
    if "mpi" in names and shutil.which("mpirun") is None:
        return "--backend mpi needs an MPI library: there is no mpirun (apt install openmpi-bin)"
    if "mpi" in names and importlib.util.find_spec("mpi4py") is None:
        return "--backend mpi needs mpi4py: pip install mpi4py, or pycomm[mpi]"
    if "nccl" in names:
        from pycomm.bench.torch_backends import no_nccl

        return no_nccl(ranks_here)
    return ""
