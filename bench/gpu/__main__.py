"""`make gpu`: checks and times pycomm on a GPU.

    python -m pycomm.bench.gpu --results bench/results

The suites of checks.py run first: the contract test for every implementation, collectives and
the backend with several ranks on one GPU. Then every kernel is timed (tasks.py), then
all-reduces of several ranks. The kernels under compute-sanitizer, which is slow, come last. Results
go to one CSV row by row, so a crash or timeout keeps all earlier rows. Nothing is downloaded or
installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pycomm.bench.common.arguments import some_of
from pycomm.bench.gpu import checks as gpu_checks
from pycomm.bench.gpu import workers as gpu_workers
from pycomm.bench.gpu.checks import Counts
from pycomm.bench.gpu.results import NO_TIMES, GpuRow, Table, this_machine
from pycomm.bench.gpu.tasks import tasks_of

KINDS = ("native", "nvrtc", "triton", "reference")
NUMELS = (1 << 20, 1 << 26)  # a small bucket, and one that is bound by bandwidth
MINUTES = 9.0  # for checks and times, without the build; 16 cores and an H200 take eight


class GpuRun:
    """The results so far."""

    def __init__(self, table: Table, minutes: float) -> None:
        self.table, self.deadline = table, time.monotonic() + 60 * minutes
        self.problems: list[str] = []
        self.counts: dict[str, Counts] = {}

    def check(self, suites: list[gpu_checks.Suite]) -> None:
        """Run suites side by side and add a row for each."""
        found = gpu_checks.run(suites, self.deadline)
        self.counts |= found
        for name, counts in found.items():
            self.table.add(GpuRow("check", str(counts), name, *NO_TIMES))
            if not counts.good:
                self.problem(f"{name}: {counts}")

    def take(self, messages: Iterator[dict]) -> None:
        """Add the rows and problems that worker processes report."""
        for message in messages:
            if "problem" in message:
                self.problem(message["problem"])
                continue
            row = GpuRow(**message["row"])
            contract = str(self.counts.get(f"contract {row.kind}", "not run"))
            row = dataclasses.replace(row, contract=contract if row.kind in KINDS else "")
            self.table.add(row)
            print(_line(row), flush=True)

    def problem(self, text: str) -> None:
        if text not in self.problems:  # a missing codec is reported at each size
            self.problems.append(text)
            print(f"problem: {text}", file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.gpu", description="Checks and times the codecs on a GPU."
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of CSV")
    parser.add_argument(
        "--kinds", type=some_of("kind", KINDS), default=KINDS, help="such as native,triton"
    )
    parser.add_argument("--numel", type=int, nargs="+", default=NUMELS, help="values per call")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="then it ends")
    parser.add_argument("--no-checks", action="store_true", help="time without testing first")
    parser.add_argument("--no-times", action="store_true", help="test and time nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("pycomm.bench.gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    here = this_machine(" ".join(["python", "-m", "pycomm.bench.gpu", *arguments]))
    table = Table(options.results, here)
    run = GpuRun(table, options.minutes)
    if not options.no_checks:
        run.check(gpu_checks.contract(options.kinds))
        for suite in gpu_checks.ranks():
            run.check([suite])
    if not options.no_times:
        tasks = tasks_of(tuple(options.kinds), tuple(options.numel))
        run.take(gpu_workers.perform(tasks, run.deadline))
        run.take(gpu_workers.collectives(run.deadline))
    if not options.no_checks:
        sanitizers, reason = gpu_checks.sanitizers()
        run.check(sanitizers)
        if reason:
            print(f"memcheck and racecheck are left out: {reason}")
    print(f"wrote {table.path}")
    if run.problems:
        print(f"problems, named above: {len(run.problems)}", file=sys.stderr)
    return 1 if run.problems else 0


def _line(row: GpuRow) -> str:
    speed = f"{row.microseconds:>10.1f} us {row.gbps:>6.0f} GB/s ({row.share:.0%})"
    return f"{row.kind:<9} {row.numel:>9} {row.codec:<46} {row.op:<16} {speed}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
