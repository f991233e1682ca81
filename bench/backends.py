"""Who runs a collective: pycomm's core, or backends of torch.distributed, in the same processes.

`pycomm` is the core without torch, `pycomm:ring` and the like the same with this algorithm,
`pycomm-torch` a backend of torch, `gloo` its own, `mpi` whatever library mpirun belongs to. Those
with `-shared` work on memory that the group has allocated, so that peers address it in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _C
from pycomm.bench.operations import STORAGE, Array, Case, Run

NAMES = (
    *("pycomm", "pycomm-shared", "pycomm-torch", "pycomm-torch-shared", "gloo", "mpi"),
    *(f"pycomm:{algo}" for algo in _C.ALGOS),
)
# What torch.distributed calls them.
TORCH_NAMES = {"pycomm-torch": "pycomm", "pycomm-torch-shared": "pycomm", "gloo": "gloo"}


class Backend(ABC):
    """One way to run every operation of :mod:`pycomm.bench.operations`."""

    name: str

    def buffers(self, case: Case) -> tuple[Array, Array]:
        """Zeros for the input and the output of `case`, which are one where it is in place."""
        return case.buffers()

    @abstractmethod
    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        """A call that does the operation once, from `x` to `y`. Only what it needs stays in it."""

    @abstractmethod
    def sent_bytes(self) -> int | None:
        """What this rank has sent since the start; None: not counted."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def close(self) -> None: ...


class Core(Backend):
    def __init__(self, name: str, store: _C.Store, rank: int, ranks: int) -> None:
        self.name = name
        options = _C.CommunicatorOptions()
        options.group = f"bench-{name}"
        if ":" in name:
            options.algo = name.partition(":")[2]
        self.communicator: _C.Communicator = _C.Communicator(store, rank, ranks, options)

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        if codec == "none":
            return case.op.core(self.communicator, case, x, y)
        pieces = _C.Pieces()
        pieces.add(case.count, _C.Codec(codec))
        reduce, address = self.communicator.all_reduce_coded, x.ctypes.data

        def run() -> None:
            reduce(address, pieces)

        return run

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


class Torch(Backend):
    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self.group = group

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        import torch
        import torch.distributed as dist

        tensors = [torch.from_numpy(array) for array in (x, y)]
        if case.dtype == "bfloat16":
            tensors = [tensor.view(torch.bfloat16) for tensor in tensors]
        return case.op.torch(dist, self.group, case, *tensors)

    def sent_bytes(self) -> int | None:
        return None

    def describe(self) -> str:
        import torch

        return f"torch {torch.__version__} {TORCH_NAMES[self.name]}"

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class SharedTorch(Torch):
    """The same on memory of the group's allocate_tensor(): where DDP keeps its buckets."""

    def buffers(self, case: Case) -> tuple[Array, Array]:
        import torch

        cpu = torch.device("cpu")
        backend = self.group._get_backend(cpu)
        dtype = getattr(torch, case.dtype)

        def allocate(numel: int) -> Array:
            tensor = backend.allocate_tensor(numel, dtype=dtype, device=cpu)
            array: Array = tensor.view(torch.uint8).numpy().view(STORAGE[case.dtype])
            return array

        return case.buffers(allocate)


def connect(names: Sequence[str], folder: Path, rank: int, ranks: int) -> list[Backend]:
    """Meet the other ranks in every backend, in the order of the names."""
    backends: list[Backend] = []
    for name in names:
        if name.partition(":")[0] in ("pycomm", "pycomm-shared"):
            core = SharedCore if name == "pycomm-shared" else Core
            backends.append(core(name, _C.Store.file(str(folder)), rank, ranks))
        elif name == "mpi":
            from pycomm.bench.mpi import Mpi  # mpi4py starts MPI when it is imported

            backends.append(Mpi())
        else:
            kind = SharedTorch if name == "pycomm-torch-shared" else Torch
            backends.append(kind(name, _torch_group(TORCH_NAMES[name], folder, rank, ranks)))
    return backends


def _torch_group(backend: str, folder: Path, rank: int, ranks: int) -> Any:
    """The default group, or a further group beside it."""
    import torch.distributed as dist

    from pycomm import takeover

    if backend == "pycomm":
        import pycomm.backend  # noqa: F401  (torch knows the name by itself where it is installed)

    with takeover.released():  # whatever PYCOMM_TAKEOVER says
        if dist.is_initialized():
            return dist.new_group(backend=backend)
        store = dist.FileStore(str(folder / "torch"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        return dist.group.WORLD
