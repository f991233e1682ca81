"""Basics of all benchmarks: sizes, the common schema of results, and their origin.

Every row of every benchmark has the columns of :class:`Row`, in a printed table and in an
append-only CSV.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import Field, asdict, dataclass, fields
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pycomm import _C
from pycomm.bench.common import tables
from pycomm.env import given

UNTOLD = {"PYCOMM_SECRET", "PYCOMM_CUDA", "PYCOMM_CUDA_ARCH", "PYCOMM_TORCH", "PYCOMM_SANITIZE"}
"""Variables that are not recorded in rows: a secret, and build options."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return the bytes of "8", "64K", "1.5M", "2G", with an optional B.

    Raises:
        ValueError: the text has another form, or is not a whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].upper()] if match else math.nan
    if not size.is_integer():
        raise ValueError(f"cannot read the size {text!r}: want bytes such as 8, 64K or 1.5M")
    return int(size)


def format_size(size: int) -> str:
    """Return the shortest text that parse_size reads back."""
    for unit in ("G", "M", "K"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def sizes(first: int, last: int, factor: float) -> Iterator[int]:
    """Yield first, first * factor, ... up to last; 0 is alone, and the factor is above 1."""
    size = first
    while size <= last:
        yield size
        if size == 0:
            return
        size = max(size + 1, int(size * factor))


@dataclass(frozen=True)
class Origin:
    """The time, commit and machine of a result; the same for all rows of a run."""

    time: str
    command: str
    commit: str
    device: str
    cores: int
    load: float
    """runnable processes in the minute before, since load distorts measurements"""
    kernel: str
    congestion: str
    simd: str
    python: str
    pycomm: str
    torch: str

    @classmethod
    def here(cls, command: str) -> Origin:
        """Return the origin of this process; PYCOMM variables that are set precede the command."""
        ours = {k: v for k, v in given().items() if k not in UNTOLD}
        # Whoever repeats the command has another folder.
        command = re.sub(r"(?<=[ =])/\S*/(?=bench/results/)", "", command)
        return cls(
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=" ".join([*(f"{k}={shlex.quote(v)}" for k, v in ours.items()), command]),
            commit=_commit(),
            device=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            load=round(os.getloadavg()[0], 1),
            kernel=platform.release(),
            congestion=_read("/proc/sys/net/ipv4/tcp_congestion_control"),
            simd=_C.simd_level(),
            python=platform.python_version(),
            pycomm=_version("pycomm"),
            torch=_version("torch"),
        )


@dataclass(frozen=True)
class Row:
    """One result of any benchmark; docs/bench.md explains each column.

    Times are in microseconds, rates in GB/s (10^9 bytes); None: not applicable.

    Kinds:
        time: a collective.
        codec: one core; `algbw` counts float32 bytes, `copybw` is memcpy's in the same run and
            `of_copy` the ratio of the two.
        loss: of `bench training`: one training.
        step: of `bench step`.
    """

    kind: str
    op: str
    backend: str
    ranks: int
    size: int
    count: int
    type: str
    redop: str = ""
    codec: str = "none"
    place: str = ""
    """of a collective's result: "in" memory of its input, or "out" of it"""
    iterations: int = 0
    time_p50: float | None = None
    time_p99: float | None = None
    time_device: float | None = None
    """median by a GPU's events"""
    algbw: float | None = None
    busbw: float | None = None
    effbw: float | None = None
    wrong: int | None = None
    ratio: float | None = None
    err: float | None = None
    wire_bytes: float | None = None
    cpu_seconds: float | None = None
    """user and system time of all threads of all ranks, per call"""
    copybw: float | None = None
    of_copy: float | None = None
    connection: str = ""

    # Only for trainings; `count` is the number of parameters.
    model: str = ""
    parameters: int | None = None
    method: str = ""
    hook: str = ""
    """torch's own communication hook"""
    rate: str = ""
    """the link's rate, as tc writes it"""
    seed: int | None = None
    steps: int | None = None
    seconds: float | None = None
    """median of a step"""
    wire_seconds: float | None = None
    """of the link, for `wire_bytes`"""
    bound: float | None = None
    """seconds of the shortest step that the link allows; `ratio` is `seconds` over it"""
    memory: int | None = None
    """most bytes that were allocated: on the GPU, else of the process"""
    parts: str = ""
    """ "part:ms" of a step's parts, of which each waits for the one before"""
    windows: int | None = None
    """windows of held-out text for `loss`; a curve uses 256"""
    loss: float | None = None
    curve: str = ""
    """ "step:loss" at every evaluation"""


COLUMNS = [f.name for f in fields(Row)] + [f.name for f in fields(Origin)]


Read = TypeVar("Read")


def record(row: Row | dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return a row as tables have it."""
    return (row if isinstance(row, dict) else asdict(row)) | asdict(origin)


def read_rows(path: Path, kind: type[Read]) -> list[Read]:
    """Read rows of a CSV as a dataclass. Missing columns get their default values."""
    return rows_of(tables.read(path), kind)


def rows_of(lines: Iterable[tables.Row], kind: type[Read]) -> list[Read]:
    """Return the rows of a table as a dataclass."""
    columns = fields(kind)
    return [
        kind(**{f.name: _value(f, line[f.name]) for f in columns if line.get(f.name)})
        for line in lines
    ]


def _value(column: Field[Any], text: str) -> str | int | float:
    kinds: dict[str, type[int | float]] = {"int": int, "float": float}
    kind = kinds.get(str(column.type).removesuffix(" | None"))
    return text if kind is None else kind(text)


def output(*words: str) -> str:
    """Return what a command prints; empty if it fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def _commit() -> str:
    """Return the checkout's commit, with a + if it has changes; empty outside a checkout."""
    here = "git", "-C", str(Path(__file__).parent)
    root = output(*here, "rev-parse", "--show-toplevel")
    # pycomm may be installed in the environment of another project, which has commits of its own.
    if not root or not Path(root, "bench/common/harness.py").exists():
        return ""
    return output(*here, "describe", "--always", "--dirty=+", "--exclude=*")


@cache
def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return found[1] if found else platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
