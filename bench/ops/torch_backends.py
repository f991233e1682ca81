"""Backends of torch.distributed in the benchmark: pycomm's and Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm import takeover
from pycomm.bench.ops import coded
from pycomm.bench.ops.backend import BackendCalls
from pycomm.bench.ops.cases import STORAGE, Array, Case, Run

# The names in torch.distributed.
NAMES = {
    "pycomm-torch": "pycomm",
    "pycomm-torch-shared": "pycomm",
    "gloo": "gloo",
}
UNKNOWN = ("uint32", "uint64")
"""types that Gloo does not reduce or send"""


class Torch(BackendCalls):
    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self.group = group
        self.has_codecs = NAMES[name] == "pycomm"

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
        x_tensor, y_tensor = self.tensors(case, x, y)
        if codec == "none":
            return case.op.torch(dist, self.group, case, x_tensor, y_tensor)
        native = self.group._get_backend(torch.device("cpu"))
        return coded.torch_run(native, case, x_tensor, y_tensor, codec)

    def sent_bytes(self) -> int | None:
        if NAMES[self.name] != "pycomm":
            return None
        sent: int = self.group._get_backend(torch.device("cpu")).sent_bytes
        return sent

    def describe(self) -> str:
        return f"torch {torch.__version__} {NAMES[self.name]}"

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class SharedTorch(Torch):
    """The backend on memory from the group's allocate_tensor(), where DDP keeps its buckets."""

    def buffers(self, case: Case) -> tuple[Array, Array]:
        cpu = torch.device("cpu")
        backend = self.group._get_backend(cpu)
        dtype = getattr(torch, case.dtype)

        def allocate(numel: int) -> Array:
            tensor = backend.allocate_tensor(numel, dtype=dtype, device=cpu)
            array: Array = tensor.view(torch.uint8).numpy().view(STORAGE[case.dtype])
            return array

        return case.buffers(allocate)


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
