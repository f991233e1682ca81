"""Tasks of several kinds with each method: where a method loses more than elsewhere.

    python -m pycomm.bench training --suite --csv bench/results/suite-cpu.csv

Every method trains on every task (tasks.py) with AdamW on two ranks on a loopback. All runs of a
seed share weights, data and their order. The loss is that of held-out data at the end, over that of
the exact run with the same seed; the spread is that of the exact runs among seeds. Rows that the
CSV holds are not measured again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.common.harness import Row
from pycomm.bench.common.report import markdown
from pycomm.bench.training.methods import TOP_1, Method
from pycomm.bench.training.results import describe, loss, pairs
from pycomm.bench.training.tasks import TASKS, Task, batch
from pycomm.bench.training.train import schedule

KIND = "suite"
EXACT = "exact"
INT8 = "residual:storage=int8"
LOCAL = {"every": 16, "codec": "int4"}
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
            )
            for without in (" factors=off", "")
        ),
        Method("sign", codec="sign"),
        Method("coded momentum, sign", momentum="sign"),
        Method("coded momentum, top-k 1 %", momentum=TOP_1),
        Method("LocalSGD, int4", local=LOCAL),
        # By default residuals of tensors as small as these are float32.
        Method("int4, residuals in int8", codec="int4", feedback=INT8),
        Method("sign, residuals in int8", codec="sign", feedback=INT8),
        Method("coded momentum, sign, residuals in int8", momentum="sign", feedback=INT8),
        Method("LocalSGD, int4, residuals in int8", local={**LOCAL, "feedback": INT8}),
    )
}
UNEVEN = "columns", "rows"
"""Tasks that factors of rows and columns are for: elsewhere a method without them is the same."""


def train(task: Task, method: Method, seed: int) -> tuple[float, int]:
    """Train on the default group; return the held-out loss and the model's size. Collective."""
    torch.manual_seed(seed)
    bare = task.model()
    trained = [p for p in bare.parameters() if p.requires_grad]
    system = method.start(bare, task.rate, (0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        system.optimizer, lambda step: schedule(step, task.steps, task.steps // 20, task.least)
    )
    for step in range(task.steps):
        inputs, targets = batch(task, seed, step, dist.get_rank())
        task.loss(system.model(inputs), targets).backward()
        if task.clip:
            nn.utils.clip_grad_norm_(trained, task.clip)
        system.apply()
        scheduler.step()
    system.finish()
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
    wanted = (one for one in wanted if one[0] in UNEVEN or "factors=off" not in one[1])
    return [one for one in wanted if one not in there]


def ranks_train(wanted: Sequence[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """Be a rank of `jobs.ask` that trains each task with a method and a seed."""
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    for task, label, seed in wanted:
        held_out, count = train(TASKS[task], METHODS[label], seed)
        yield {"task": task, "label": label, "seed": seed, "loss": held_out, "count": count}
    dist.destroy_process_group()


def row(task: str, label: str, seed: int, loss: float, count: int) -> Row:
    """Return the row of what a rank has yielded."""
    blank = describe(KIND, task, count, METHODS[label])
    return replace(blank, seed=seed, steps=TASKS[task].steps, loss=loss)


def changes(rows: Sequence[Row]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the changes in percent, by method and task, and the spreads of the exact losses.

    With several seeds a change is the mean over seeds. A spread is the standard deviation among
    seeds over the mean, in percent; NaN: there is one seed.
    """
    found: dict[str, dict[str, float]] = {label: {} for label in METHODS if label != EXACT}
    spreads = {}
    for task in TASKS:
        exact = [loss(row) for row, _ in pairs(EXACT, task, rows, kind=KIND, exact=EXACT)]
        if exact:
            middle = statistics.fmean(exact)
            spreads[task] = 100 * statistics.stdev(exact) / middle if exact[1:] else math.nan
        for label, of in found.items():
            if both := pairs(label, task, rows, kind=KIND, exact=EXACT):
                of[task] = 100 * statistics.fmean(loss(a) / loss(b) - 1 for a, b in both)
    return {label: of for label, of in found.items() if of}, spreads


def mean(of: Mapping[str, float], *, kept_back: bool) -> float | None:
    """Return a method's mean over the tasks that constants were chosen on, or over those that were
    kept back; None: it lacks some."""
    tasks = [task.name for task in TASKS.values() if task.kept_back == kept_back]
    return statistics.fmean(of[task] for task in tasks) if set(tasks) <= of.keys() else None


def table(rows: Sequence[Row]) -> str:
    """Return the table with a row per method of the suite: its means, and its worst task.

    The last column is what exact losses of that task differ by among seeds.
    """
    found, spreads = changes(rows)
    table = []
    for method, of in found.items():
        worst = max(of, key=of.__getitem__)
        means = [mean(of, kept_back=kept_back) for kept_back in (False, True)]
        shown = [*(of.get(task) for task in UNEVEN), *means, of[worst]]
        cells = ("" if change is None else f"{change:+.1f}" for change in shown)
        table.append([method, *cells, worst, f"{spreads[worst]:.1f}"])
    head = ("method", *UNEVEN, "mean", "mean, kept back", "worst", "task", "its spread")
    return markdown(head, table)
