"""Backends of torch.distributed in the benchmark: pycomm's, Gloo and NCCL."""

from __future__ import annotations

import os
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
    "nccl": "nccl",
}
UNKNOWN = ("uint32", "uint64")
"""types that torch's own backends do not reduce or send"""


class Torch(BackendCalls):
    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self.group = group
        self.has_codecs = NAMES[name] == "pycomm"

    def refuses(self, case: Case) -> str:
        if NAMES[self.name] == "pycomm":
            return ""
        if case.dtype in UNKNOWN:
            return f"{self.name} has no {case.dtype}"
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


class Nccl(Torch):
    """NCCL on this rank's GPU. A call ends when the GPU is done; host copies are not timed."""

    def __init__(self, name: str, group: Any) -> None:
        super().__init__(name, group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._on_gpu: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        host = self.tensors(case, x, y)
        source = torch.zeros_like(host[0], device=self.device)
        target = source if x is y else torch.zeros_like(host[1], device=self.device)
        self._on_gpu = {x.ctypes.data: (host[0], source), y.ctypes.data: (host[1], target)}
        call = case.op.torch(dist, self.group, case, source, target)
        stream = torch.cuda.current_stream(self.device)

        def run() -> None:
            call()
            stream.synchronize()

        return run

    def load(self, x: Array, y: Array) -> None:
        for array in (x, y):
            host, gpu = self._on_gpu[array.ctypes.data]
            gpu.copy_(host)

    def fetch(self, x: Array, y: Array) -> None:
        for array in (x, y):
            host, gpu = self._on_gpu[array.ctypes.data]
            host.copy_(gpu)

    def describe(self) -> str:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return f"NCCL {version} on {torch.cuda.get_device_name(self.device)}"


def make(name: str, folder: Path, rank: int, ranks: int) -> Torch:
    """Connect to the other ranks in one backend of torch."""
    if name == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    kinds = {"pycomm-torch-shared": SharedTorch, "nccl": Nccl}
    return kinds.get(name, Torch)(name, _group(NAMES[name], folder, rank, ranks))


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


def no_nccl(ranks_here: int) -> str:
    """Return why NCCL cannot be used by so many local ranks; empty if it can."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return f"--backend nccl needs a GPU, and torch {torch.__version__} finds none here"
    if not dist.is_nccl_available():
        return f"--backend nccl: torch {torch.__version__} was built without NCCL"
    if gpus < ranks_here:
        return (
            f"--backend nccl needs a GPU for each rank: {ranks_here} ranks, {gpus} GPUs (-p {gpus})"
        )
    return ""
