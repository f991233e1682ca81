"""A rank that makes groups step by step, for steps.py: each step begins on all ranks at once.

    python -m pycomm.bench.links.steps_rank FOLDER BACKEND

Ranks wait for each other in files, not over the network: before step S, rank R makes `S.R`, and
waits for `S.go`; after it, it writes what it took into `S.R.done`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
OPTIONAL = ("split_group", "reconfigure", "reconfigure again", "reconfigure with a new member")
"""endings of steps that other backends may not have"""


def main(folder: Path, backend: str) -> None:
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

    actions: dict[str, Callable[[], Any]] = {
        "init": init,
        "first operation": reduce,
        "operation": reduce,
        "new_group": lambda: make("new_group"),
        "first operation of new_group": lambda: reduce("new_group"),
        "split_group": lambda: make("split_group"),
        "first operation of split_group": lambda: reduce("split_group"),
        "reconfigure": lambda: form(1),
        "first operation of reconfigure": lambda: reduce("reconfigure"),
        "reconfigure again": lambda: form(2),
        "reconfigure with a new member": lambda: form(3),
        "shutdown": dist.destroy_process_group,
    }
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
            result = actions[step]()
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
