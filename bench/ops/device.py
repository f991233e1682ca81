"""Backends on tensors of a GPU, in the benchmark of collectives: `--device cuda`.

`pycomm-torch` is pycomm's backend, by the way that it chooses: kernels among peers, or the host.
`pycomm-host` goes by way of the host; `nccl` is torch's own, and `pycomm-nccl` codes what NCCL
moves. Calls work on copies of the arrays that the benchmark fills and checks. A call is timed by
the clock until the GPU has done it, and by events of the GPU.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm import takeover
from pycomm.bench.common import accelerator
from pycomm.bench.ops import coded
from pycomm.bench.ops.cases import Array, Case, Run
from pycomm.bench.ops.torch_backends import NAMES, Torch


class TimedRun:
    """Calls that are done when they return, and that events of the GPU time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seconds: list[float] = []

    def __call__(self) -> None:
        self._seconds.append(accelerator.seconds(self._run))

    def time(self) -> float:
        """Return the median of the calls, in us."""
        return 1e6 * statistics.median(self._seconds)


class OnDevice(Torch):
    """A backend of torch.distributed on copies of arrays.

    Args:
        name: of the backend.
        group: its process group.
        device: of the copies.
    """

    def __init__(self, name: str, group: Any, device: torch.device) -> None:
        super().__init__(name, group, device)
        self._copies: dict[int, torch.Tensor] = {}

    def refuses(self, case: Case) -> str:
        if self.name.startswith("pycomm-nccl") and case.op.name not in coded.CORE:
            return f"{self.name} codes {', '.join(coded.CORE)}"
        if case.dtype in ("uint32", "uint64"):
            return f"{self.name} has no {case.dtype}"
        return ""

    def _copy(self, array: Array, dtype: str) -> torch.Tensor:
        """Return the copy of an array: a part of that of the memory in which the array lies."""
        whole = array if array.base is None else array.base
        if id(whole) not in self._copies:
            found = torch.from_numpy(whole).to(self.device)
            self._copies[id(whole)] = found.view(torch.bfloat16) if dtype == "bfloat16" else found
        begin = (array.ctypes.data - whole.ctypes.data) // array.itemsize
        return self._copies[id(whole)][begin : begin + array.size]

    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        self._copies.clear()
        tensors = self._copy(x, case.dtype), self._copy(y, case.dtype)
        run = self.call(case, *tensors, codec)
        return run if self.device.type == "cpu" else TimedRun(run)

    def push(self, *arrays: Array) -> None:
        for array in arrays:
            copy = self._copy(array, "")
            copy.view(torch.uint8).copy_(torch.from_numpy(array).view(torch.uint8))

    def pull(self, *arrays: Array) -> None:
        for array in arrays:
            copy = self._copy(array, "")
            torch.from_numpy(array).view(torch.uint8).copy_(copy.view(torch.uint8))

    def event_time(self, run: Run) -> float | None:
        return run.time() if isinstance(run, TimedRun) else None

    def describe(self) -> str:
        shared = accelerator.sharing(self.group.size())
        return ", ".join(filter(None, [super().describe(), shared]))


def missing() -> str:
    """Return why there is no GPU to measure, and a remedy; "" if there is one."""
    if accelerator.kind():
        return ""
    return "--device cuda needs an NVIDIA GPU, its driver, and a torch that was built for CUDA"


def make(name: str, folder: Path, rank: int, ranks: int) -> OnDevice:
    """Connect to the other ranks in one backend, on this rank's GPU."""
    device = accelerator.take(rank, ranks)
    with takeover.released():
        if not dist.is_initialized():
            store = dist.FileStore(str(folder / "torch"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        options = accelerator.group(NAMES[name], device.type)
        if name == "pycomm-host":
            options["pg_options"] = pycomm.Options(device_path="host")
        group = dist.new_group(**options)
    return OnDevice(name, group, device)
