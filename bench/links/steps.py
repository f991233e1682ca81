"""Groups of ranks far apart: how many round trips each step takes, beside Gloo.

    python -m pycomm.bench links steps --nodes 2,8 --round-trip 60ms,200ms

For each number of nodes and each round trip one rank per node runs jobs of pycomm and of Gloo in
turns. A job makes a group, runs its first operation, makes other groups from it, and shuts down;
all ranks begin each step at once. The medians of the jobs are printed. Round trips are counted, not
timed: the lab numbers each packet by the longest chain of packets before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.bench.lab.jobs import Failed
from pycomm.bench.lab.shape import Shape, seconds
from pycomm.bench.lab.wan import WanLab
from pycomm.bench.links.steps_rank import STEPS

PROMISED = {
    "init": 9,  # 8 if the ranks reach the exchange of values together, after torch's part of it
    "first operation": 2,
    "new_group": 5,
    "first operation of new_group": 2,
    "split_group": 6,  # two are torch's, which connects to its store once more
    "first operation of split_group": 2,
    "reconfigure": 8,
    "first operation of reconfigure": 2,
    "reconfigure again": 8,
    "reconfigure with a new member": 8,  # the last one has left, and another process has come
    "shutdown": 2,
}
"""the most round trips that a step of pycomm takes, where all ranks begin it at once"""
LIMIT = 300.0  # seconds for one step: a rank that hangs must not hang this


@dataclass(frozen=True)
class Step:
    """Cost of one step.

    Attributes:
        seconds: of the slowest rank.
        round_trips: half of the longest chain of one-way trips that packets made. It depends on
            what waits for what, and not on how fast this machine is.
        results: what the step returned on each rank.
    """

    name: str
    seconds: float
    round_trips: float
    results: list[Any]


def run_steps(lab: WanLab, backend: str, env: dict[str, str]) -> tuple[list[Step], str]:
    """Return the steps of one job with one rank per node, and all that its ranks have printed.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as printed:
        folder = Path(name)
        command = [sys.executable, "-m", "pycomm.bench.links.steps_rank", name, backend]
        ranks = lab.start(command, env=env, stdout=printed, stderr=printed)
        slowest = max(2 * pair.delay for pair in lab.pairs.values())

        def text() -> str:
            printed.seek(0)
            return printed.read().decode(errors="replace")

        def await_all(pattern: str) -> list[Path]:
            files = [folder / pattern.format(rank=rank) for rank in range(lab.nodes)]
            until = time.monotonic() + LIMIT
            while not all(file.exists() for file in files):
                if any(rank.poll() for rank in ranks) or time.monotonic() > until:
                    raise Failed(f"{backend}: a rank failed in step {pattern}:\n{text()}")
                time.sleep(0.001)
            return files

        steps = []
        for number, step in enumerate(STEPS):
            await_all(f"{number}.{{rank}}")
            time.sleep(1.5 * slowest)  # until the packets of the step before are gone
            lab.mark()
            (folder / f"{number}.go").touch()
            done = [json.loads(file.read_text()) for file in await_all(f"{number}.{{rank}}.done")]
            trips = lab.trips()
            results = [one["result"] for one in done]
            if any(isinstance(result, str) for result in results):
                continue
            steps.append(Step(step, max(one["seconds"] for one in done), trips / 2, results))
        for rank in ranks:
            if rank.wait(LIMIT) != 0:
                raise Failed(f"{backend}: a rank failed at its end:\n{text()}")
        return steps, text()


COLUMNS = (
    *(("nodes", 5, ""), ("round_trip_ms", 13, ""), ("step", -31, ""), ("backend", -7, "")),
    *(("ms", 9, ""), ("round_trips", 11, "")),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", default="2,4,8", help="numbers of nodes, comma-separated (2,4,8)")
    add("--round-trip", default="30ms,60ms,200ms", help="comma-separated (30ms,60ms,200ms)")
    add("--rate", default="200mbit", help="of each node (200mbit)")
    add("--backend", default="pycomm,gloo", help="comma-separated (pycomm,gloo)")
    add("--jobs", type=int, default=3, help="of each backend, in turns (3)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of nodes, round trip, step and backend.

    Raises:
        Failed: a rank failed.
    """
    for text in options.round_trip.split(","):
        trip = seconds("round trip", text)
        for nodes in map(int, options.nodes.split(",")):
            found: dict[tuple[str, str], list[Step]] = {}
            with WanLab(nodes, options.rate, shape=Shape(delay=trip / 2)) as lab:
                for backend in options.backend.split(",") * options.jobs:
                    steps, printed = run_steps(lab, backend, dict(os.environ))
                    lab.stop()
                    sys.stderr.write(printed)
                    for step in steps:
                        found.setdefault((step.name, backend), []).append(step)
            for step, backend in sorted(found, key=lambda key: STEPS.index(key[0])):
                jobs = found[step, backend]
                ms = 1e3 * statistics.median(job.seconds for job in jobs)
                trips = statistics.median(job.round_trips for job in jobs)
                yield {
                    "nodes": nodes,
                    "round_trip_ms": f"{1e3 * trip:g}",
                    "rate": options.rate,
                    "step": step,
                    "backend": backend,
                    "jobs": len(jobs),
                    "ms": f"{ms:.1f}",
                    "round_trips": f"{trips:g}",
                    "promised": PROMISED.get(step, "") if backend == "pycomm" else "",
                }
