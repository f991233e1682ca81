"""`make gpu`: checks and times pycomm on a GPU, in stages.

    python -m pycomm.bench.gpu --results bench/results --stages smoke,step --minutes 4

The stages come in the order of what they tell a minute, and each ends within its minutes:

    smoke        two ranks, as `python -m pycomm.doctor --gpu`: averages, and their path
    step         steps of a GPT beside what the link allows (`python -m pycomm.bench step`)
    kernels      every kernel beside a copy, as in tasks.py
    collectives  all-reduces of two ranks beside NCCL's (`bench all_reduce --device cuda`)
    optimizer    CodedAdamW beside torch's fused AdamW
    contract     the contract test of every implementation, ranks on one GPU (checks.py)
    sanitize     the kernels under compute-sanitizer
    trace        a profile of a step in int4 (trace-<device>.json, for Perfetto)

Rows go to CSV files at once, so that a crash or a timeout keeps all earlier ones. `contract` and
`sanitize` go on where an earlier run of the same sources has stopped. At the end stands what has
run, and the command for what is left. Nothing is downloaded or installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pycomm import triton_kernels
from pycomm.bench.__main__ import reported
from pycomm.bench.common import accelerator, arguments, tables
from pycomm.bench.common.harness import Origin, output
from pycomm.bench.gpu import checks
from pycomm.bench.gpu.tasks import KINDS, SPECS, TIMED, GpuRow, table
from pycomm.codecs.cuda.sources import include_folder
from pycomm.doctor import gpu as doctor

NUMELS = (1 << 20, 1 << 26)  # a small bucket, and one that is bound by bandwidth
TASKS = "pycomm.bench.gpu.tasks"


def sources() -> str:
    """Return a digest of the kernels and of their tests."""
    digest = hashlib.sha256()
    for folder in (include_folder(), Path(triton_kernels.__file__).parent, Path("tests/codecs")):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".h", ".cpp"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class GpuRun:
    """The results so far.

    Args:
        options: of the command line.
        machine: columns that are equal in all rows.
    """

    def __init__(self, options: argparse.Namespace, machine: dict[str, Any]) -> None:
        self.options, self.machine, self.folder = options, machine, options.results
        self.end = self.deadline = time.monotonic() + 60 * options.minutes
        self.problems: list[str] = []
        self.unfinished = False
        """The stage has left something for another run."""

    def begin(self, minutes: float) -> bool:
        """Begin a stage of so many minutes; return False if the run's time is over."""
        self.deadline, self.unfinished = min(self.end, time.monotonic() + 60 * minutes), False
        return time.monotonic() < self.end

    def file(self, name: str = "gpu") -> Path:
        """Return a CSV of this device."""
        return table(self.folder, self.machine, name)

    def checked(self, name: str) -> str:
        """Return what a suite has said of these sources; "" if it has not run, or has failed."""
        rows = tables.read(self.file()) if self.file().exists() else []
        wanted = "check", name, str(self.machine.get("sources", ""))
        said = [
            row["contract"]
            for row in rows
            if (row["kind"], row["codec"], row.get("sources")) == wanted
        ]
        return said[-1] if said and "failed" not in said[-1] else ""

    def check(self, suite: checks.Suite) -> None:
        """Run a suite and add its row, unless it has passed."""
        if self.checked(suite.name):
            return
        left = self.deadline - time.monotonic()
        counts = checks.run(suite, left) if left > 0 else None
        if counts is None:
            self.unfinished = True
            return
        said = checks.spelled(counts)
        self.tell(suite.name, said)
        if counts.keys() - {"passed"}:
            self.problems.append(f"{suite.name}: {said}")

    def tell(self, name: str, said: str) -> None:
        """Add the row of a check."""
        tables.append(self.file(), [asdict(GpuRow("check", said, name)) | self.machine])

    def call(self, name: str, *command: str) -> None:
        """Run a module to its end, and not longer than the stage."""
        left = self.deadline - time.monotonic()
        status = checks.status_of([sys.executable, "-m", *command], left)
        if status is None:
            self.unfinished = True
            self.problems.append(f"{name}: out of time, its later rows are missing")
        elif status:
            self.problems.append(f"{name}: its process ended with status {status}, see above")

    def time(self, kind: str, numels: list[int]) -> None:
        """Time a kind in another process; a crash, or too long a time, loses its later rows."""
        job = {"kind": kind, "numels": numels, "specs": self.options.codec}
        job |= {"folder": str(self.folder), "machine": self.machine}
        self.call(kind, TASKS, json.dumps(job))


def this_machine(command: str) -> dict[str, Any]:
    """Return the origin of the rows, whose device is the GPU, and what compiles for it."""

    def version(module: str) -> str:
        try:
            return str(__import__(module).__version__)
        except ImportError:
            return "none"

    release = re.search(r"release ([\d.]+)", output("nvcc", "--version"))
    here = Origin.here(command)
    here = replace(here, device=accelerator.api().get_device_name(), torch=torch.__version__)
    return asdict(replace(here, pycomm=here.pycomm or "staged")) | {
        "driver": accelerator.driver(),
        "cuda": release.group(1) if release else "none",
        "triton": version("triton"),
        "cupy": version("cupy"),
    }


def smoke(run: GpuRun) -> None:
    """Two ranks on this GPU, which say the path that default options take."""
    found = doctor.run(accelerator.kind(), max(run.deadline - time.monotonic(), 1.0))
    for finding in found:
        print(f"{finding.name}: {finding.text}", flush=True)
        if finding.level == "problem" or (finding.name, finding.level) == ("ranks", "note"):
            run.problems.append(f"smoke: {finding.text}")
    run.tell("smoke", found[-1].text)


def measured(name: str, run: GpuRun) -> None:
    """Run a command of `pycomm.bench`, whose rows go to a file of its own."""
    files = {"--csv": ".csv"} | ({"--trace": ".json"} if name == "trace" else {})
    words = [f"{option}={run.file(name).with_suffix(end)}" for option, end in files.items()]
    run.call(name, "pycomm.bench", *WORDS[name], *words)


def kernels(run: GpuRun) -> None:
    for kind in run.options.kinds:
        if kind in TIMED:
            run.time(kind, list(run.options.numel))


def contract(run: GpuRun) -> None:
    for file in checks.RANKS:
        run.check(checks.Suite(Path(file).stem, [file]))
    for part in checks.PARTS:
        for kind in run.options.kinds:
            run.check(checks.contract(kind, part))


def sanitize(run: GpuRun) -> None:
    tool = checks.sanitizer()
    kinds = [kind for kind in run.options.kinds if kind in ("native", "nvrtc")]
    if not tool or not kinds:
        why = "--kinds has neither native nor nvrtc" if tool else "no compute-sanitizer on the PATH"
        print(f"memcheck and racecheck are left out: {why}")
        return
    for part in checks.PARTS:
        for suite in checks.sanitizers(tool, part, kinds[0]):
            run.check(suite)


Stage = Callable[[GpuRun], None]
STAGES: dict[str, tuple[float, Stage]] = {
    "smoke": (1, smoke),
    "step": (3, partial(measured, "step")),
    "kernels": (3, kernels),
    "collectives": (1, partial(measured, "collectives")),
    "optimizer": (1, partial(measured, "optimizer")),
    "contract": (4, contract),
    "sanitize": (4, sanitize),
    "trace": (1, partial(measured, "trace")),
}
"""By name the minutes of each, and what it does."""
WORDS = {
    "step": ("step", "--rounds", "1"),  # two take three minutes at 1 Gbit/s
    "collectives": (
        *("all_reduce", "--device", "cuda", "-b", "64M", "-e", "64M", "-n", "20"),
        *("--codec", "none,int8,int4"),
    ),
    "optimizer": ("training", "--only", "optimizer", "--models", "25m,124m"),
    "trace": (
        *("step", "--methods", "int4", "--backend", "pycomm", "--rate", "10gbit", "--rounds", "1"),
    ),
}
"""The commands of `pycomm.bench` that stages run, but for their files."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench gpu", description=__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=Path("bench/results"), help="folder of CSV")
    known = arguments.some_of("stage", STAGES)
    add("--stages", type=known, default=list(STAGES), help=f"({','.join(STAGES)})")
    whole = sum(minutes for minutes, _ in STAGES.values())
    add("--minutes", type=float, default=whole, help=f"then it ends ({whole})")
    known = arguments.some_of("kind", KINDS)
    add("--kinds", type=known, default=KINDS, help="such as native,triton")
    add("--numel", type=int, nargs="+", default=NUMELS, help="values per call")
    what = "whose kernels are timed (all)"
    add("--codec", type=arguments.codecs, default=SPECS, metavar="CODEC,...", help=what)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if not accelerator.kind():
        needs = "this needs an NVIDIA GPU, its driver, and a torch that was built for CUDA"
        print(f"pycomm.bench.gpu: torch sees no GPU here: {needs}", file=sys.stderr)
        return 2
    machine = this_machine(" ".join(["python", "-m", "pycomm.bench.gpu", *argv]))
    machine |= {"sources": sources()}
    run = GpuRun(options, machine)
    ran: list[str] = []
    left: list[str] = []
    for name in options.stages:
        minutes, stage = STAGES[name]
        if not run.begin(minutes):
            left.append(name)
            continue
        before = len(run.problems)
        stage(run)
        ran.append(name + " (problems)" * (len(run.problems) > before))
        if run.unfinished:
            left.append(name)
    print(f"ran: {', '.join(ran) or 'nothing'}; rows are in {run.file()}")
    if left:
        print(f"left: make gpu STAGES={','.join(left)}")
    for problem in run.problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if run.problems or left else 0


if __name__ == "__main__":
    sys.exit(reported(partial(main, sys.argv[1:])))
