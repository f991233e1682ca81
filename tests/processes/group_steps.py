"""A job whose ranks make groups step by step, and how many round trips each step takes.

A job makes a group, runs its first operation, makes other groups from it, and shuts down; all ranks
begin each step at once. Round trips are counted, not timed: the lab numbers each packet by the
longest chain of packets before it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm.backend  # noqa: F401  not within the step that is counted
from pycomm._build import load_c10d
from pycomm.bench.lab.jobs import Failed, command_of
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
        round_trips: half of the longest chain of one-way trips that packets made. It depends on
            what waits for what, and not on how fast this machine is.
        results: what the step returned on each rank.
    """

    name: str
    round_trips: float
    results: list[Any]


def run_steps(lab: WanLab) -> tuple[list[StepCost], str]:
    """Return the steps of one job with one rank per node, and all that its ranks have printed.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as printed:
        folder = Path(name)
        command = command_of(take_steps, (folder,), folder / "log")
        ranks = lab.start(command, env=dict(os.environ), stdout=printed, stderr=printed)
        slowest = 2 * lab.shape.delay

        def text() -> str:
            printed.seek(0)
            return printed.read().decode(errors="replace")

        def await_all(pattern: str) -> list[Path]:
            files = [folder / pattern.format(rank=rank) for rank in range(lab.nodes)]
            until = time.monotonic() + LIMIT
            while not all(file.exists() for file in files):
                if any(rank.poll() for rank in ranks) or time.monotonic() > until:
                    raise Failed(f"a rank failed in step {pattern}:\n{text()}")
                time.sleep(0.001)
            return files

        steps = []
        for number, step in enumerate(STEPS):
            await_all(f"{number}.{{rank}}")
            time.sleep(1.5 * slowest)  # until the packets of the step before are gone
            lab.mark()
            (folder / f"{number}.go").touch()
            done = [json.loads(file.read_text()) for file in await_all(f"{number}.{{rank}}.done")]
            steps.append(StepCost(step, lab.trips() / 2, done))
        for rank in ranks:
            if rank.wait(LIMIT) != 0:
                raise Failed(f"a rank failed at its end:\n{text()}")
        return steps, text()


# ------------------------------------------------------------------------ ranks


def take_steps(folder: Path) -> Iterator[None]:
    """Be a rank that makes groups step by step, each of which begins on all ranks at once.

    Ranks wait for each other in files, not over the network: before step S, rank R makes `S.R`, and
    waits for `S.go`; after it, it writes the step's result into `S.R.done`.
    """
    yield from ()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made: dict[str, Any] = {}

    def reduce(group: str = "") -> list[float]:
        x = torch.arange(4, dtype=torch.float32) + rank
        made[group].allreduce([x]).wait()
        return x.tolist()

    def init() -> None:
        dist.init_process_group("pycomm", timeout=timedelta(seconds=120))
        made[""] = dist.group.WORLD

    def make(name: str) -> None:
        everyone = list(range(size))
        if name == "new_group":
            made[name] = dist.new_group(everyone)
        else:
            made[name] = made[""].split_group(everyone, group_name=name)

    def form(uuid: int) -> None:
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
        done = folder / f"{number}.{rank}.done"
        done.with_suffix(".new").write_text(json.dumps(take(step)))
        done.with_suffix(".new").rename(done)
    for name in ("former", "reconfigure"):
        if made.get(name) is not None:
            made[name].shutdown()
    del server


def without_members() -> Any:
    """Return a group of pycomm that is still to be formed."""
    options = load_c10d().Options()
    options.enable_reconfigure = True
    options.group_name = "elastic"
    return load_c10d().Backend(dist.HashStore(), 0, 1, options, "elastic")
