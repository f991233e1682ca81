"""Collectives of several backends side by side, in nccl-tests' words.

    python -m pycomm.bench all_reduce -b 8 -e 64M -f 4 -p 2 --backend pycomm,gloo
    torchrun --nproc-per-node 4 -m pycomm.bench all_gather --backend pycomm-torch,gloo

Without torchrun it starts its own ranks. All backends run in the same processes and take turns, a
block of iterations each, so that whatever else the machine does meets all of them alike. The time
of an iteration is that of its slowest rank. docs/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pycomm.bench import backends, harness, mpi
from pycomm.bench.harness import Origin
from pycomm.bench.measure import BLOCKS, Rank
from pycomm.bench.operations import ALIASES, OPERATIONS, REDUCTIONS, STORAGE
from pycomm.bench.report import Report, ratios
from pycomm.env import env

COLUMNS = (
    ("size", 6, ""),
    ("count", 9, "d"),
    ("type", 8, ""),
    ("redop", 5, ""),
    ("backend", 12, ""),
    ("codec", 8, ""),
    ("time_p50", 10, ".2f"),
    ("time_p99", 10, ".2f"),
    ("algbw", 7, ".3f"),
    ("busbw", 7, ".3f"),
    ("effbw", 7, ".3f"),
    ("wrong", 6, "d"),
    ("ratio", 6, ".2f"),
    ("err", 8, ".1e"),
    ("wire_bytes", 9, ".0f"),
)


def print_ratios(report: Report, baseline: str) -> None:
    """How many times better every backend is than the baseline; the rows join the report."""
    found = ratios(report.rows, baseline)
    if not found:
        return
    report.note(f"\n# times better than {baseline} (p50, p99: shorter; effbw: higher)")
    report.note(f"{'size':>6} {'backend':>12} {'codec':>8} {'p50':>8} {'p99':>8} {'effbw':>8}")
    for row in found:
        values = (row.time_p50, row.time_p99, row.effbw)
        cells = " ".join(f"{value:>7.1f}x" if value else f"{'-':>8}" for value in values)
        size = harness.format_size(row.size)
        report.note(f"{size:>6} {row.backend:>12} {row.codec:>8} {cells}")
    report.rows += found


def rank_main(
    options: argparse.Namespace, command: str, folder: Path, rank: int, ranks: int
) -> int:
    origin = Origin.here(command)
    member = Rank(options, rank, ranks, folder)
    report = Report(COLUMNS, len(options.sizes) * BLOCKS, quiet=rank != 0)
    with report.progress():
        connections = [f"{b.name}: {b.describe()}" for b in member.backends]
        where = f"{origin.device}, {origin.cores} cores, commit {origin.commit or 'unknown'}"
        report.header(f"{options.op}, {ranks} ranks on {where}", *connections)
        right = member.run(report)
        if len(options.backend) > 1:
            print_ratios(report, options.baseline)
    if rank == 0:
        report.save(origin, json_path=options.json, csv_path=options.csv)
        if not right:
            print("WRONG: the column #wrong counts elements with a wrong value", file=sys.stderr)
    member.close()
    return 0 if right or rank != 0 else 1


def launch(argv: Sequence[str], ranks: int, mpi_wanted: bool) -> int:
    """Start this program once per rank; the first that fails ends all."""
    if mpi_wanted:
        command = [sys.executable, "-m", "pycomm.bench", *argv]
        # mpirun gives the ranks a terminal of its own, on which they would draw progress bars.
        plain = {} if sys.stdout.isatty() else {"TERM": "dumb"}
        variables = {"GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ) | plain
        return subprocess.run([*mpi.mpirun(ranks), *command], env=variables).returncode
    folder = _meeting_place(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)  # of a process with our number that was killed
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            names = {"RANK": rank, "LOCAL_RANK": rank}
            names |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            # Gloo would look up the host's name, which not every machine can.
            variables = {"GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ)
            variables |= {name: str(value) for name, value in names.items()}
            command = [sys.executable, "-m", "pycomm.bench", *argv]
            processes.append(subprocess.Popen(command, env=variables))
        while True:
            codes = [process.poll() for process in processes]
            failed = {rank: code for rank, code in enumerate(codes) if code}
            if failed or None not in codes:
                for rank, code in failed.items():
                    print(f"rank {rank} ended with {code}", file=sys.stderr)
                return 1 if failed else 0
            time.sleep(0.05)
    finally:
        _end(processes)
        shutil.rmtree(folder, ignore_errors=True)


def _meeting_place(starter: int) -> Path:
    """The folder of the ranks that one process has started: torchrun, or ourselves."""
    return Path(tempfile.gettempdir()) / f"pycomm-bench-{starter}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let the ranks tell each other why they end, then end them."""
    deadline = time.monotonic() + 5
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _list_of(*known: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if known and name not in known]
        if unknown or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r}: want one or more of {', '.join(known)}")
        return names

    return parse


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("op", choices=OPERATIONS, help="the collective")
    add(
        "-b",
        dest="first",
        type=harness.size_argument,
        default="8",
        help="smallest size in bytes (8)",
    )
    add(
        "-e",
        dest="last",
        type=harness.size_argument,
        default="64M",
        help="largest size, always measured (64M)",
    )
    add("-f", dest="factor", type=float, default=4, help="factor between sizes (4)")
    add("-n", dest="iterations", type=int, default=0, help="iterations (as fit half a second)")
    add("-w", dest="warmup", type=int, default=5, help="warm-up iterations (5)")
    add("-c", dest="check", type=int, default=1, choices=(0, 1), help="check results (1)")
    add("-d", dest="dtype", default="float32", choices=[*STORAGE, *ALIASES], help="element type")
    add("-o", dest="redop", default="sum", choices=REDUCTIONS, help="reduction (sum)")
    add("-p", dest="ranks", type=int, default=2, help="ranks to start, without torchrun (2)")
    add("--pin", type=int, default=1, choices=(0, 1), help="a core for each rank, if enough (1)")
    add("-J", "--json", help="write all rows to this file")
    add("--csv", help="append all rows to this file")
    add("--backend", type=_list_of(*backends.NAMES), default="pycomm", help="comma-separated")
    add("--codec", type=_list_of(), default="none", help="of pycomm all_reduce: none,int8,...")
    add("--store", help="folder where ranks meet: shared by all nodes, if there are several")
    options = parser.parse_args(argv)
    options.dtype = ALIASES.get(options.dtype, options.dtype)
    if options.last < options.first:
        parser.error(f"-e {options.last} is smaller than -b {options.first}")
    if options.factor <= 1:
        parser.error(f"-f {options.factor:g} must be larger than 1")
    coded = options.codec != ["none"]
    if coded and (options.op, options.dtype) != ("all_reduce", "float32"):
        parser.error("--codec is for all_reduce of float32")
    if coded and "pycomm" not in options.backend:
        parser.error("--codec is for the backend pycomm")
    options.sizes = sorted(
        {*harness.sizes(options.first, options.last, options.factor), options.last}
    )
    options.baseline = "gloo" if "gloo" in options.backend else options.backend[-1]
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    rank, ranks = env().rank, env().world_size
    if rank is None and "mpi" in options.backend:
        rank, ranks = mpi.started_by_mpirun() or (None, None)
    if rank is None or ranks is None:
        return launch(argv, options.ranks, "mpi" in options.backend)
    folder = Path(options.store) if options.store else _meeting_place(os.getppid())
    folder.mkdir(exist_ok=True)
    try:
        command = shlex.join(["python", "-m", "pycomm.bench", *argv])
        return rank_main(options, command, folder, rank, ranks)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
