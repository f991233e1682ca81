"""`make bench`: repeats the CPU measurements that take half an hour, then draws the figures.

    python -m pycomm.bench.refresh                       all commands below
    python -m pycomm.bench.refresh --only demo,links     those of these tables
    python -m pycomm.bench.refresh --list                what would run

Each command writes the table in bench/results that its row below names. Its new rows replace those
that the same command wrote before. Rows of other commands stay, since pages of docs cite them. A
command that fails leaves its table as it was, and the others continue. Measurements that take
longer than half an hour are listed in bench/results/README.md with their commands.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common import tables

LIMIT = 1500.0  # seconds per command
JUDGED = {"pycomm.bench.validate_plan": 1}
"""Exit statuses of complete measurements that found a broken promise; their rows count."""
ALGORITHMS = "pycomm:one_shot,pycomm:two_shot,pycomm:bruck,pycomm:halving_doubling,pycomm:ring,gloo"
METHODS = (
    "Gloo, fp32$|Gloo, fp16 hook|exact|int8|int4$|EDEN 2 bits of 128|EDEN 1 bit|PowerSGD rank 4"
)


def mpi() -> str:
    """Return ",mpi" for a list of backends if an MPI library and mpi4py are installed."""
    found = shutil.which("mpirun") and importlib.util.find_spec("mpi4py")
    return ",mpi" if found else ""


def commands() -> list[tuple[str, str]]:
    """Return tables and their commands: `python -m pycomm.bench`, these words, and --csv TABLE."""
    return [
        ("all_reduce-cpu.csv", " all_reduce -b 8 -e 64M -f 2 -p 2 --backend pycomm,gloo -n 30"),
        (
            "collectives-cpu.csv",
            f" all_reduce -b 8 -e 64M -f 2 -p 2 -n 20 --backend pycomm,pycomm-shared,gloo{mpi()}",
        ),
        *(
            (
                "collectives-cpu.csv",
                f" {op} -b 1M -e 64M -f 64 -p 2 -n 12 --backend pycomm,pycomm-torch,gloo{mpi()}",
            )
            for op in ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
        ),
        *(
            (
                "algorithms-cpu.csv",
                f" all_reduce -b 8 -e 32K -f 64 -p {ranks} -n 10 -w 2 --backend {ALGORITHMS}",
            )
            for ranks in (4, 16)
        ),
        ("codecs-cpu.csv", " codecs -b 1M -e 1M"),
        ("distortion-cpu.csv", " codecs --errors"),
        ("optimizers-cpu.csv", " training --only optimizer --models demo,25m"),
        (
            "links-cpu.csv",
            ".links --rate 1gbit --rate 10gbit --congestion reno --op all_reduce,sendrecv -n 5",
        ),
        ("wan-cpu.csv", ".wan"),
        ("wan-throughput-cpu.csv", ".wan.throughput --quick --iperf-time 3"),
        ("demo-cpu.csv", ".demo"),
        *(
            (
                "steps-cpu.csv",
                f" training --only steps --models demo --rates {rate} --rounds 1 "
                f"--turn-seconds 2 --methods {shlex.quote(METHODS)}",
            )
            for rate in ("50mbit", "200mbit", "1gbit", "10gbit")
        ),
        ("scale-cpu.csv", ".scale -p 8,16"),
        ("plan-cpu.csv", ".validate_plan"),
        ("predictions.csv", ".predictions"),
    ]


def merge(table: Path, fresh: Path) -> int:
    """Replace the rows that have the commands of a new table's rows; return the number of rows."""
    rows = tables.read(fresh)
    done = {row["command"] for row in rows}
    kept = tables.read(table) if table.exists() else []
    kept = [row for row in kept if row["command"] not in done]
    columns = list(dict.fromkeys([*rows[0], *(name for row in kept[:1] for name in row)]))
    draft = table.with_suffix(".draft")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    draft.replace(table)
    return len(rows)


def run(table: str, words: str, results: Path, log: Path) -> bool:
    """Run one command in a temporary folder, so that its own file names are always the same."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder, "bench/results", table)
        fresh.parent.mkdir(parents=True)
        module, *arguments = shlex.split(f"pycomm.bench{words}")
        command = [sys.executable, "-m", module, *arguments, "--csv", f"bench/results/{table}"]
        begin = time.monotonic()
        with log.open("a") as output:
            print("#", shlex.join(command[1:]), file=output, flush=True)
            try:
                status = subprocess.run(
                    command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT
                ).returncode
            except subprocess.TimeoutExpired:
                status = 124  # the status of timeout(1)
        good = status in (0, JUDGED.get(module)) and fresh.exists()
        rows = f"{merge(results / table, fresh)} rows" if good else "no rows"
        verdict = f", status {status}: see {log}" if status else ""
        print(f"{time.monotonic() - begin:6.0f} s  {rows}{verdict}", flush=True)
        return good


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.refresh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="", help="beginnings of tables' names, comma-separated")
    add("--list", action="store_true", help="print the commands")
    add("--results", type=Path, default=tables.RESULTS, help="folder of the tables")
    add("--log", type=Path, default=Path("build/bench.log"), help="what commands print")
    options = parser.parse_args(argv)
    chosen = [
        (table, words)
        for table, words in commands()
        if table.startswith(tuple(options.only.split(",")))
    ]
    if not chosen:
        parser.error(f"no table begins with {options.only!r}")
    options.log.parent.mkdir(parents=True, exist_ok=True)
    log = options.log.resolve()
    good = True
    for number, (table, words) in enumerate(chosen, start=1):
        print(f"{number:>2}/{len(chosen)} {table}: python -m pycomm.bench{words}", flush=True)
        if not options.list:
            good &= run(table, words, options.results.resolve(), log)
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
