"""Groups over links with delay: how many round trips each step takes, beside Gloo.

    python -m pycomm.bench.wan --nodes 2,8 --round-trip 60ms,200ms --csv bench/results/wan-cpu.csv

For each number of nodes and each round trip it makes a lab (lab.py) with one rank per node, and
runs jobs of pycomm and of Gloo in turns. A job makes a group, runs its first operation, makes other
groups from it, and shuts down; all ranks begin each step at once. The medians of the jobs are
printed, and written with the command that made them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.lab.base import Unavailable
from pycomm.bench.wan.lab import WanLab
from pycomm.bench.wan.rank import STEPS
from pycomm.bench.wan.shape import Shape, seconds
from pycomm.bench.wan.steps import PROMISED, Failed, Step, run_steps


def measure(
    nodes: int, round_trip: float, rate: str, backends: Sequence[str], jobs: int
) -> dict[tuple[str, str], list[Step]]:
    """Return the steps of all jobs by backend and name.

    Raises:
        Failed: a rank failed.
        Unavailable: no lab can be made here.
    """
    found: dict[tuple[str, str], list[Step]] = {}
    with WanLab(nodes, rate, shape=Shape(delay=round_trip / 2)) as lab:
        print(lab.describe(), file=sys.stderr)
        for _ in range(jobs):
            for backend in backends:
                steps, printed = run_steps(lab, backend, dict(os.environ))
                lab.stop()
                sys.stderr.write(printed)
                for step in steps:
                    found.setdefault((backend, step.name), []).append(step)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.wan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", default="2,4,8", help="numbers of nodes, comma-separated (2,4,8)")
    add("--round-trip", default="30ms,60ms,200ms", help="comma-separated (30ms,60ms,200ms)")
    add("--rate", default="200mbit", help="of each node (200mbit)")
    add("--backend", default="pycomm,gloo", help="comma-separated (pycomm,gloo)")
    add("--jobs", type=int, default=3, help="of each backend, in turns (3)")
    add("--csv", default="", help="append the rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.wan", *argv]))
    backends = options.backend.split(",")
    print("nodes  round trip  step                             backend      ms  round trips")
    try:
        for text in options.round_trip.split(","):
            for nodes in map(int, options.nodes.split(",")):
                trip = seconds("round trip", text)
                records = []
                found = measure(nodes, trip, options.rate, backends, options.jobs)
                for step in STEPS:
                    for backend in backends:
                        jobs = found.get((backend, step))
                        if not jobs:
                            continue
                        ms = 1e3 * statistics.median(job.seconds for job in jobs)
                        trips = statistics.median(job.round_trips for job in jobs)
                        print(
                            f"{nodes:>5}  {text:>10}  {step:<31}  {backend:<7} {ms:>7.0f}"
                            f"  {trips:>11.1f}",
                            flush=True,
                        )
                        records.append(
                            {
                                "nodes": nodes,
                                "round_trip_ms": f"{1e3 * trip:g}",
                                "rate": options.rate,
                                "step": step,
                                "backend": backend,
                                "jobs": len(jobs),
                                "ms": f"{ms:.1f}",
                                "round_trips": f"{trips:g}",
                                "promised": PROMISED.get(step, "") if backend == "pycomm" else "",
                                **vars(origin),
                            }
                        )
                if options.csv:
                    tables.append(Path(options.csv), records)
    except (Failed, ValueError) as error:
        print(f"wan: {error}", file=sys.stderr)
        return 2
    except Unavailable as error:
        print(f"wan: the lab cannot be made here: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
