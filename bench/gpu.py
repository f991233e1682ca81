"""`make gpu`: checks and times the codecs on a GPU.

    python -m pycomm.bench.gpu --results bench/results

Every implementation first takes the contract test (tests/codecs/test_contract.py on cuda, a process
each, side by side); then each of its kernels is timed (gpu_timing.py) and written to one CSV.
Nothing is downloaded or installed.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import pycomm
from pycomm.bench.gpu_timing import bytes_moved, call_of, l2_bytes, measure, sets_needed, time_copy
from pycomm.codecs.implementations import Unavailable, implementation

KINDS = ("native", "nvrtc", "triton", "reference")
OPS = ("encode", "encode_feedback", "decode", "decode_add")
SPECS = (
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8:rounding=stochastic",
    "int8:block=2048",
    "int4",
    "int4:rounding=stochastic",
    "int4:block=32",
)
NUMELS = (1 << 20, 1 << 26)  # a small bucket, and one whose time is all bandwidth
REFERENCE_NUMEL = 1 << 22  # plain torch makes dozens of passes and temporaries
CONTRACT = "tests/codecs/test_contract.py"


@dataclass(frozen=True)
class Machine:
    """Where the numbers come from; in every row."""

    device: str
    driver: str
    cuda: str
    torch: str
    triton: str
    cupy: str
    python: str
    pycomm: str
    commit: str
    date: str
    command: str


@dataclass(frozen=True)
class Row:
    """One kernel, timed."""

    kind: str  # native, nvrtc, triton or reference
    contract: str  # what the contract test said of this kind in this run: "767 passed"
    codec: str
    op: str
    numel: int
    bytes: int  # that the kernel must move
    microseconds: float
    gbps: float
    copy_gbps: float  # device-to-device copy of numel values: read and written
    share: float  # gbps / copy_gbps
    method: str  # graph, or events if it cannot be captured


@dataclass(frozen=True)
class Counts:
    """What pytest said."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        parts = [f"{n} {name}" for name, n in dataclasses.asdict(self).items() if n]
        return ", ".join(parts) or "no tests"

    @property
    def good(self) -> bool:
        return self.passed > 0 and self.failed == 0 and self.skipped == 0


# ------------------------------------------------------------------- the contract test


def counts_of(junit: Path) -> Counts:
    """Read pytest's JUnit report; none at all is a failure."""
    if not junit.exists():
        return Counts(failed=1)
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite")).attrib
    total, skipped = int(suite["tests"]), int(suite["skipped"])
    failed = int(suite["failures"]) + int(suite["errors"])
    return Counts(total - failed - skipped, failed, skipped)


def run_contract(kinds: Iterable[str]) -> dict[str, Counts]:
    """Run the contract test of each kind on cuda, all at once; print the words of what fails."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for kind in kinds:
            junit, log = Path(folder, f"{kind}.xml"), Path(folder, f"{kind}.log")
            command = [sys.executable, "-m", "pytest", CONTRACT, "-k", f"{kind}-cuda"]
            # Without the project's options: they are strict about plugins that may not be here.
            command += ["-q", "--tb=short", "--maxfail=20", "-o", "addopts=", f"--junitxml={junit}"]
            with log.open("w") as out:
                process = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TRITON_INTERPRET": "0"},
                )
            running.append((kind, process, junit, log))
        for kind, process, junit, log in running:
            process.wait()
            found[kind] = counts_of(junit)
            print(f"contract test, {kind} on cuda: {found[kind]}", flush=True)
            if not found[kind].good:
                print("\n".join(log.read_text().splitlines()[-40:]), flush=True)
    return found


# ----------------------------------------------------------------------------- results


def time_kernel(kind: str, spec: str, op: str, numel: int, copy: float, contract: str) -> Row:
    codec = pycomm.codec(spec)
    run = implementation(codec.name, kind, "cuda")
    moved = bytes_moved(codec, op, numel)
    sets = sets_needed(moved, l2_bytes())
    seconds, method = measure([call_of(run, codec, op, numel) for _ in range(sets)])
    gbps = 1e-9 * moved / seconds
    return Row(
        kind=kind,
        contract=contract,
        codec=codec.spec(),
        op=op,
        numel=numel,
        bytes=moved,
        microseconds=round(1e6 * seconds, 3),
        gbps=round(gbps, 1),
        copy_gbps=round(copy, 1),
        share=round(gbps / copy, 3),
        method=method,
    )


def slug(device: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(folder: Path, machine: Machine, rows: list[Row]) -> Path:
    """Write one CSV for this machine, one row per kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{slug(machine.device)}.csv"
    fields = [f.name for f in (*dataclasses.fields(Row), *dataclasses.fields(Machine))]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, fields)
        table.writeheader()
        for row in rows:
            table.writerow({**dataclasses.asdict(row), **dataclasses.asdict(machine)})
    return path


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
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        command=command,
    )


def _pycomm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pycomm")
    except PackageNotFoundError:
        return "staged"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.gpu", description="Checks and times the codecs on a GPU."
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of CSV")
    parser.add_argument("--kinds", type=_words(KINDS), default=KINDS, help="such as native,triton")
    parser.add_argument("--numel", type=int, nargs="+", default=NUMELS, help="values per call")
    parser.add_argument("--no-contract", action="store_true", help="time without testing first")
    return parser.parse_args(arguments)


def _words(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def words(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        for word in given:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r}: use {', '.join(known)}")
        return given

    return words


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("pycomm.bench.gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    counts = {} if options.no_contract else run_contract(options.kinds)
    here = this_machine(" ".join(["python", "-m", "pycomm.bench.gpu", *arguments]))
    rows: list[Row] = []
    problems = [f"{kind}: {found}" for kind, found in counts.items() if not found.good]
    for kind in options.kinds:
        try:
            implementation("quant", kind, "cuda")
        except (ImportError, Unavailable) as reason:
            problems.append(f"{kind} is missing: {reason}")
            continue
        for numel in (REFERENCE_NUMEL,) if kind == "reference" else options.numel:
            copy = time_copy(numel)
            for spec in SPECS:
                rows += _time_codec(kind, spec, numel, copy, counts, problems)
    print(f"wrote {write(options.results, here, rows)}")
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _time_codec(
    kind: str,
    spec: str,
    numel: int,
    copy: float,
    counts: dict[str, Counts],
    problems: list[str],
) -> list[Row]:
    """Time the four calls; one that fails is a problem, and the others still count."""
    contract = str(counts.get(kind, "not run"))
    rows = []
    for op in OPS:
        try:
            rows.append(time_kernel(kind, spec, op, numel, copy, contract))
        except RuntimeError as error:
            problems.append(f"{kind} {spec} {op}: {error}")
    if rows:
        print(_line(rows), flush=True)
    return rows


def _line(rows: list[Row]) -> str:
    cells = "  ".join(f"{row.op} {row.gbps:.0f} GB/s ({row.share:.0%})" for row in rows)
    return f"{rows[0].kind:<9} {rows[0].numel:>9} {rows[0].codec:<46} {cells}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
