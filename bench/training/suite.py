"""Tasks of several kinds with each method: where a method loses more than elsewhere.

    python -m pycomm.bench training --suite --csv bench/results/suite-cpu.csv

Every method trains on every task (tasks.py) with AdamW on two ranks on a loopback. All runs of a
seed share weights, data and their order. The loss is that of held-out data at the end, over that of
the exact run with the same seed; the spread is that of the exact runs among seeds. Rows that the
CSV holds are not measured again.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench import netlab
from pycomm.bench.common.harness import Row
from pycomm.bench.lab import jobs
from pycomm.bench.training.methods import Method
from pycomm.bench.training.tasks import TASKS, Task, batch, rate

KIND = "suite"
EXACT = "exact"
_LOCAL = {"every": 16, "codec": "int4"}
METHODS = {
    method.label: method
    for method in (
        Method(EXACT),
        *(
            Method(f"{label}{without and ', factors=off'}", codec=f"{codec}{without}")
            for label, codec in (
                ("int8", "int8"),
                ("int4", "int4"),
                ("EDEN 2 bits of 128", "eden:bits=2,size=128"),
                ("top-k 1 %", "topk:0.01"),
                ("sign", "sign"),
            )
            for without in (" factors=off", "")
        ),
        Method("coded momentum, sign", momentum="sign"),
        Method("PowerSGD rank 4", codec="powersgd:4"),
        Method("LocalSGD, int4", local=_LOCAL),
    )
}


def train(task: Task, method: Method, seed: int) -> tuple[float, int]:
    """Train on the default group; return the held-out loss and the model's size. Collective."""
    torch.manual_seed(seed)
    bare = task.model()
    model = method.wrap(bare)
    trained = [p for p in bare.parameters() if p.requires_grad]
    optimizer, finish = method.optimizer(model, task.rate, (0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(task, step))
    for step in range(task.steps):
        inputs, targets = batch(task, seed, step, dist.get_rank())
        task.loss(model(inputs), targets).backward()
        if task.clip:
            nn.utils.clip_grad_norm_(trained, task.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    finish()
    bare.eval()
    inputs, targets = batch(task, seed, -1, 0)
    with torch.no_grad():
        parts = zip(inputs.split(64), targets.split(64), strict=True)
        losses = [task.loss(bare(one), target) * len(one) for one, target in parts]
    return float(sum(losses)) / len(inputs), sum(p.numel() for p in trained)


def missing(
    rows: Iterable[Row], tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int]
) -> list[tuple[str, str, int]]:
    """Return the task, method and seed of each training that the rows do not have."""
    there = {(row.model, row.method, row.seed) for row in rows if row.kind == KIND}
    wanted = ((task, method, seed) for seed in seeds for task in tasks for method in methods)
    return [one for one in wanted if one not in there]


def measure(wanted: Sequence[tuple[str, str, int]], heard: Callable[[Row], object]) -> None:
    """Train on two ranks, and tell each result as it comes.

    Raises:
        Failed: a rank failed.
    """
    env = {"PYCOMM_TRANSPORT": os.environ.get("PYCOMM_TRANSPORT", "tcp")}
    with netlab.Paced(2, netlab.UNLIMITED) as lab:
        lab.timed = False  # losses do not depend on it
        jobs.ask(
            lab,
            "pycomm.bench.training.suite",
            env,
            heard=lambda found: heard(_row(**found)),
            wanted=[list(one) for one in wanted],
        )


def _row(task: str, label: str, seed: int, loss: float, count: int) -> Row:
    method = METHODS[label]
    return Row(
        kind=KIND,
        op="training",
        backend=method.backend,
        ranks=2,
        size=4 * count,
        count=count,
        type="float32",
        codec=method.codec or method.momentum or method.local.get("codec", "none"),
        model=task,
        parameters=count,
        method=label,
        seed=seed,
        steps=TASKS[task].steps,
        loss=loss,
    )


def changes(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each training with its change against the exact one of its seed."""
    last = {(row.model, row.method, row.seed): row for row in rows if row.kind == KIND}
    found = []
    for (task, _, seed), row in last.items():
        exact = last.get((task, EXACT, seed))
        if exact is not None and exact.loss is not None and row.loss is not None:
            found.append(replace(row, change=row.loss / exact.loss - 1))
    return found


def table(rows: Iterable[Row]) -> list[list[str]]:
    """Return the changes in percent, a line for each task; the first line names the methods.

    With several seeds a change is the mean over seeds, after it the spread of the exact losses
    among seeds: their standard deviation over their mean.
    """
    done = changes(rows)
    tasks = [task for task in TASKS if any(row.model == task for row in done)]
    methods = [label for label in METHODS if any(row.method == label for row in done)]
    lines = [["task", *(label for label in methods if label != EXACT), "spread of exact"]]
    for task in tasks:
        mine = [row for row in done if row.model == task]
        cells = []
        for label in methods:
            found = [
                100 * row.change for row in mine if row.method == label and row.change is not None
            ]
            cells.append(f"{statistics.fmean(found):+.1f}" if found else "")
        exact = [row.loss for row in mine if row.method == EXACT and row.loss is not None]
        several = len(exact) > 1
        spread = 100 * statistics.stdev(exact) / statistics.fmean(exact) if several else None
        del cells[methods.index(EXACT)]
        lines.append([task, *cells, "" if spread is None else f"{spread:.1f}"])
    return lines


def main(argv: Sequence[str]) -> int:
    """Be one rank: train what the job asks for."""
    job: dict[str, Any] = json.loads(argv[0])
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    for task, label, seed in job["wanted"]:
        loss, count = train(TASKS[task], METHODS[label], seed)
        if dist.get_rank() == 0:
            jobs.answer(job["log"], task=task, label=label, seed=seed, loss=loss, count=count)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
