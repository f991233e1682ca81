"""The CSV of `make gpu`: a row per measurement, with the machine that made it."""

from __future__ import annotations

import csv
import dataclasses
import platform
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """The origin of the numbers, repeated in every row."""

    device: str
    driver: str
    cuda: str
    torch: str
    triton: str
    cupy: str
    python: str
    pycomm: str
    commit: str
    time: str
    command: str


@dataclass(frozen=True)
class Row:
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

    def __init__(self, folder: Path, machine: Machine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"gpu-{slug(machine.device)}.csv"
        self._machine = dataclasses.asdict(machine)
        self._file = self.path.open("w", newline="")
        fields = [f.name for f in (*dataclasses.fields(Row), *dataclasses.fields(Machine))]
        self._table = csv.DictWriter(self._file, fields)
        self._table.writeheader()

    def add(self, row: Row) -> None:
        self._table.writerow({**dataclasses.asdict(row), **self._machine})
        self._file.flush()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def this_machine(command: str) -> Machine:
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
    return Machine(
        device=torch.cuda.get_device_name(0),
        driver=driver.partition("\n")[0],
        cuda=release.group(1) if release else "none",
        torch=torch.__version__,
        triton=version("triton"),
        cupy=version("cupy"),
        python=platform.python_version(),
        pycomm=_pycomm_version(),
        commit=output("git", "describe", "--always", "--dirty"),
        time=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        command=command,
    )


def _pycomm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pycomm")
    except PackageNotFoundError:
        return "staged"
