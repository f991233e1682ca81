"""`make gpu`: checks and times pycomm on a GPU.

    python -m pycomm.bench.gpu --results bench/results

The suites of checks.py run first: the contract test for every implementation, collectives and
the backend with several ranks on one GPU. Then every kernel is timed, and all-reduces of several
ranks (tasks.py), each kind of implementation in a process of its own. The kernels under
compute-sanitizer, which is slow, come last. Results go to one CSV row by row, so a crash or timeout
keeps all earlier rows. Nothing is downloaded or installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pycomm.bench.common import tables
from pycomm.bench.common.arguments import some_of
from pycomm.bench.common.harness import Origin
from pycomm.bench.gpu import checks, collectives
from pycomm.bench.gpu.tasks import BROKEN, KINDS, RANKS, TORCH, GpuRow, table

NUMELS = (1 << 20, 1 << 26)  # a small bucket, and one that is bound by bandwidth
MINUTES = 9.0  # for checks and times, without the build; 16 cores and an H200 take eight
KIND_SECONDS = 240.0  # for the times of one kind
TASKS = (sys.executable, "-m", "pycomm.bench.gpu.tasks")


class GpuRun:
    """The results so far."""

    def __init__(self, folder: Path, machine: dict[str, Any], minutes: float) -> None:
        self.folder, self.machine = folder, machine
        self.deadline = time.monotonic() + 60 * minutes
        self.problems: list[str] = []
        self.counts: dict[str, checks.Counts] = {}

    def check(self, suites: list[checks.Suite]) -> None:
        """Run suites side by side and add a row for each."""
        found = checks.run(suites, self.deadline)
        self.counts |= found
        for name, counts in found.items():
            row = asdict(GpuRow("check", str(counts), name)) | self.machine
            tables.append(table(self.folder, self.machine), [row])
            if not counts.good:
                self.problems.append(f"{name}: {counts}")

    def time(self, kind: str, numels: list[int]) -> None:
        """Time a kind in another process; a crash, or too long a time, loses its later rows."""
        contract = str(self.counts.get(f"contract {kind}", "not run")) if kind in KINDS else ""
        job = {"kind": kind, "numels": numels, "contract": contract}
        job |= {"folder": str(self.folder), "machine": self.machine}
        env = os.environ | (collectives.ENVIRONMENT if kind == RANKS else {})
        process = subprocess.Popen([*TASKS, json.dumps(job)], env=env, start_new_session=True)
        left = min(KIND_SECONDS, self.deadline - time.monotonic())
        try:
            status = process.wait(max(left, 0.001))
        except subprocess.TimeoutExpired:
            checks.end(process)
            self.problems.append(f"{kind}: out of time, its later rows are missing")
            return
        if status:
            how = {1: "calls failed", BROKEN: "a call broke the GPU's context"}
            what = how.get(status, f"its process ended with status {status}")
            self.problems.append(f"{kind}: {what}, see above")


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


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.gpu", description="Checks and times the codecs on a GPU."
    )
    add = parser.add_argument
    add("--results", type=Path, default=Path("bench/results"), help="folder of CSV")
    add("--kinds", type=some_of("kind", KINDS), default=KINDS, help="such as native,triton")
    add("--numel", type=int, nargs="+", default=NUMELS, help="values per call")
    add("--minutes", type=float, default=MINUTES, help="then it ends")
    add("--no-checks", action="store_true", help="time without testing first")
    add("--no-times", action="store_true", help="test and time nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("pycomm.bench.gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    machine = this_machine(" ".join(["python", "-m", "pycomm.bench.gpu", *arguments]))
    run = GpuRun(options.results, machine, options.minutes)
    path = table(options.results, machine)
    path.unlink(missing_ok=True)
    if not options.no_checks:
        run.check(checks.contract(options.kinds))
        for suite in checks.ranks():
            run.check([suite])
    if not options.no_times:
        for kind in (*options.kinds, TORCH, RANKS):
            run.time(kind, list(options.numel))
    if not options.no_checks:
        sanitizers, reason = checks.sanitizers()
        run.check(sanitizers)
        if reason:
            print(f"memcheck and racecheck are left out: {reason}")
    print(f"wrote {path}")
    for problem in run.problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
