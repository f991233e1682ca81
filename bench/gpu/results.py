"""The CSV of `make gpu`: a row per measurement, with the machine that made it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin


@dataclass(frozen=True)
class GpuRow:
    """One timed kernel or, where kind is "check", the result of one suite without times."""

    kind: str  # native, nvrtc, triton, reference, torch, ranks; or check: `codec` names the suite
    contract: str  # the contract test's result for this kind in this run: "767 passed"
    codec: str
    op: str
    numel: int
    bytes: int  # minimum memory traffic of the kernel
    microseconds: float
    gbps: float
    copy_gbps: float  # device-to-device copy of numel values, bytes read plus written
    share: float  # gbps / copy_gbps
    method: str  # graph, or events if it cannot be captured


NO_TIMES = ("", 0, 0, 0.0, 0.0, 0.0, 0.0, "")  # the rest of a row of the kind "check"


def slug(device: str) -> str:
    """Return a device's name in file name form: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class Table:
    """The CSV of this machine; rows are written as they arrive."""

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        self.path = folder / f"gpu-{slug(machine['device'])}.csv"
        self.path.unlink(missing_ok=True)
        self._machine = machine

    def add(self, row: GpuRow) -> None:
        tables.append(self.path, [asdict(row) | self._machine])


def this_machine(command: str) -> dict[str, Any]:
    """Return the origin of the rows, whose device is the GPU, and what compiles for it."""

    def output(*words: str) -> str:
        try:
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    def version(module: str) -> str:
        try:
            return str(__import__(module).__version__)
        except ImportError:
            return "none"

    release = re.search(r"release ([\d.]+)", output("nvcc", "--version"))
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    here = Origin.here(command)
    here = replace(here, device=torch.cuda.get_device_name(0), torch=torch.__version__)
    return asdict(replace(here, pycomm=here.pycomm or "staged")) | {
        "driver": driver.partition("\n")[0],
        "cuda": release.group(1) if release else "none",
        "triton": version("triton"),
        "cupy": version("cupy"),
    }
