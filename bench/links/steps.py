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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm.bench.common.arguments import counts, listed
from pycomm.bench.common.report import Column
from pycomm.bench.lab.jobs import Failed, command_of
from pycomm.bench.lab.shape import Shape, seconds
from pycomm.bench.lab.wan import WanLab

STEPS = (
    "init",
    "first operation",
    "operation",
    "new_group",
    "first operation of new_group",
    "split_group",
    "first operation of split_group",
    "reconfigure",
    "first operation of reconfigure",
    "reconfigure again",
    "reconfigure with a new member",
    "shutdown",
)
FORMED = ("reconfigure", "reconfigure again", "reconfigure with a new member")
OPTIONAL = ("split_group", *FORMED)
"""endings of steps that other backends may not have"""
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
class StepCost:
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


def run_steps(lab: WanLab, backend: str, env: dict[str, str]) -> tuple[list[StepCost], str]:
    """Return the steps of one job with one rank per node, and all that its ranks have printed.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as printed:
        folder = Path(name)
        command = command_of(take_steps, (folder, backend), folder / "log")
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
            steps.append(StepCost(step, max(one["seconds"] for one in done), trips / 2, results))
        for rank in ranks:
            if rank.wait(LIMIT) != 0:
                raise Failed(f"{backend}: a rank failed at its end:\n{text()}")
        return steps, text()


COLUMNS = (
    *(Column("nodes", 5), Column("round_trip_ms", 13), Column("step", -31), Column("backend", -7)),
    *(Column("ms", 9), Column("round_trips", 11)),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "numbers of nodes, comma-separated (2,4,8)"
    add("--nodes", type=counts, default="2,4,8", help=what)
    what = "comma-separated (30ms,60ms,200ms)"
    add("--round-trip", type=listed(), default="30ms,60ms,200ms", help=what)
    add("--rate", default="200mbit", help="of each node (200mbit)")
    what = "comma-separated (pycomm,gloo)"
    add("--backend", type=listed(), default="pycomm,gloo", help=what)
    add("--jobs", type=int, default=3, help="of each backend, in turns (3)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of nodes, round trip, step and backend.

    Raises:
        Failed: a rank failed.
    """
    for text in options.round_trip:
        trip = seconds("round trip", text)
        for nodes in options.nodes:
            found: dict[tuple[str, str], list[StepCost]] = {}
            with WanLab(nodes, options.rate, shape=Shape(delay=trip / 2)) as lab:
                for backend in options.backend * options.jobs:
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


# ------------------------------------------------------------------------ ranks


def take_steps(folder: Path, backend: str) -> Iterator[None]:
    """Be a rank that makes groups step by step, each of which begins on all ranks at once.

    Ranks wait for each other in files, not over the network: before step S, rank R makes `S.R`, and
    waits for `S.go`; after it, it writes what it took into `S.R.done`.
    """
    yield from ()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made: dict[str, Any] = {}

    def reduce(group: str = "") -> list[float]:
        x = torch.arange(4, dtype=torch.float32) + rank
        made[group].allreduce([x]).wait()
        return x.tolist()

    def init() -> None:
        dist.init_process_group(backend, timeout=timedelta(seconds=120))
        made[""] = dist.group.WORLD

    def make(name: str) -> None:
        everyone = list(range(size))
        if name == "new_group":
            made[name] = dist.new_group(everyone)
        else:
            made[name] = made[""].split_group(everyone, group_name=name)

    def form(uuid: int) -> None:
        if backend != "pycomm":
            raise ValueError("only groups of pycomm take other members")
        if uuid == 1 or (uuid == 3 and rank == size - 1):
            made["former"] = made.get("reconfigure")
            made["reconfigure"] = without_members()
        # Handles travel in files, as an agent of the cluster may bring them.
        elastic = made["reconfigure"]
        handle = folder / f"handle.{uuid}.{rank}"
        fresh = folder / f"{handle.name}.new"
        fresh.write_text(elastic.handle())
        fresh.rename(handle)
        files = [folder / f"handle.{uuid}.{r}" for r in range(size)]
        while not all(file.exists() for file in files):
            time.sleep(0.0005)
        elastic.form(uuid, [file.read_text() for file in files], timedelta(seconds=120))

    def take(step: str) -> Any:
        if "operation" in step:
            return reduce(step.partition(" of ")[2])
        if step in FORMED:
            return form(1 + FORMED.index(step))
        if step.endswith("_group"):
            return make(step)
        return init() if step == "init" else dist.destroy_process_group()

    if backend != "gloo":
        import pycomm.backend  # noqa: F401  not within the step that is measured
    # As under torchrun the store runs before the ranks come: a rank that does not find it yet would
    # try again, and that would count.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    server = None
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        server = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    for number, step in enumerate(STEPS):
        (folder / f"{number}.{rank}").touch()
        while not (folder / f"{number}.go").exists():
            time.sleep(0.0005)
        start = time.monotonic()
        try:
            result = take(step)
        except (RuntimeError, ValueError) as error:
            if not step.endswith(OPTIONAL) or backend == "pycomm":
                raise
            result = f"not here: {error}"  # the backend does not split
        took = time.monotonic() - start
        done = folder / f"{number}.{rank}.done"
        done.with_suffix(".new").write_text(json.dumps({"seconds": took, "result": result}))
        done.with_suffix(".new").rename(done)
    for name in ("former", "reconfigure"):
        if made.get(name) is not None:
            made[name].shutdown()
    del server


def without_members() -> Any:
    """Return a group of pycomm that is still to be formed."""
    from pycomm._build import load_c10d

    options = load_c10d().Options()
    options.enable_reconfigure = True
    options.group_name = "elastic"
    return load_c10d().Backend(dist.HashStore(), 0, 1, options, "elastic")
