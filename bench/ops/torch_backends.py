"""Backends of torch.distributed in the benchmark: pycomm's and Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm import takeover
from pycomm.bench.ops.backend import BackendCalls
from pycomm.bench.ops.cases import STORAGE, Array, Case, Run
from pycomm.policy import Decision, Parameter
from pycomm.reduction import two_shot
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.paths import native_backend

# The names in torch.distributed.
NAMES = {
    "pycomm-torch": "pycomm",
    "pycomm-torch-shared": "pycomm",
    "gloo": "gloo",
    "pycomm-host": "pycomm",
    "nccl": "nccl",
    "pycomm-nccl": "nccl",
}
CPU = torch.device("cpu")
UNKNOWN = ("uint32", "uint64")
"""types that Gloo does not reduce or send"""


class Torch(BackendCalls):
    """A backend of torch.distributed.

    Args:
        name: of the backend.
        group: its process group.
        device: of its tensors.
    """

    def __init__(self, name: str, group: Any, device: torch.device = CPU) -> None:
        self.name, self.group, self.device = name, group, device
        self.has_codecs = name.startswith("pycomm")

    def refuses(self, case: Case) -> str:
        if self.name == "gloo" and case.dtype in UNKNOWN:
            return f"gloo has no {case.dtype}"
        if self.name == "gloo" and case.redop == "avg":
            return "gloo has no avg"
        return ""

    def tensors(self, case: Case, *arrays: Array) -> list[torch.Tensor]:
        found = [torch.from_numpy(array) for array in arrays]
        return [t.view(torch.bfloat16) for t in found] if case.dtype == "bfloat16" else found

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        ours, result = self.tensors(case, x, y)
        return self.call(case, ours, result, codec)

    def call(self, case: Case, x: torch.Tensor, y: torch.Tensor, codec: str) -> Run:
        """Return one call on tensors."""
        if codec == "none":
            return case.op.torch(dist, self.group, case, x, y)
        return coded_run(self.group, case, x, y, codec)

    def sent_bytes(self) -> int | None:
        if NAMES[self.name] != "pycomm":
            return None
        sent: int = self.group._get_backend(self.device).sent_bytes
        return sent

    def describe(self) -> str:
        return f"torch {torch.__version__} {NAMES[self.name]}"

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class SharedTorch(Torch):
    """The backend on memory from the group's allocate_tensor(), where DDP keeps its buckets."""

    def buffers(self, case: Case) -> tuple[Array, Array]:
        backend = self.group._get_backend(CPU)
        dtype = getattr(torch, case.dtype)

        def allocate(numel: int) -> Array:
            tensor = backend.allocate_tensor(numel, dtype=dtype, device=CPU)
            array: Array = tensor.view(torch.uint8).numpy().view(STORAGE[case.dtype])
            return array

        return case.buffers(allocate)


def coded_run(group: Any, case: Case, x: torch.Tensor, y: torch.Tensor, spec: str) -> Run:
    """Return one call of a coded collective by the path that hooks take on a group."""
    parameter = Parameter("values", (case.count,), x.dtype)
    rows = case.ranks if case.op.name == "reduce_scatter" else 1
    decision = Decision(parameter, pycomm.codec(spec), "the benchmark's")
    bucket = Bucket([decision], [0], None, x.device, rows=rows)
    tensors = (x,) if case.op.name == "all_reduce" else (y, x)
    native: Any = native_backend(bucket, group, case.op.name, tensors[0])
    if native is not None:
        own = getattr(native, f"compressed_{case.op.name}")
        return lambda: own(*tensors, bucket.native, bucket.sides, seed=0, step=0).wait()
    call: Any = getattr(two_shot, case.op.name)
    return lambda: call(*tensors, bucket, group, seed=0, step=0)


def make(name: str, folder: Path, rank: int, ranks: int) -> Torch:
    """Connect to the other ranks in one backend of torch."""
    kind = SharedTorch if name == "pycomm-torch-shared" else Torch
    return kind(name, _group(NAMES[name], folder, rank, ranks))


def _group(backend: str, folder: Path, rank: int, ranks: int) -> Any:
    """Return the default group, or a further group if there is one already."""
    if backend == "pycomm":
        import pycomm.backend  # noqa: F401  (installed packages register the name without this)

    with takeover.released():  # ignores PYCOMM_TAKEOVER
        if dist.is_initialized():
            return dist.new_group(backend=backend)
        store = dist.FileStore(str(folder / "torch"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        return dist.group.WORLD
