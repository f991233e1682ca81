"""Tasks of several kinds with each method: where a method loses more than elsewhere.

    python -m pycomm.bench training --suite --csv bench/results/suite-cpu.csv

Every method trains on every task (tasks.py) with AdamW on two ranks on a loopback. All runs of a
seed share weights, data and their order. The loss is that of held-out data at the end, over that of
the exact run with the same seed; the spread is that of the exact runs among seeds. Rows that the
CSV holds are not measured again.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.common.harness import Row
from pycomm.bench.training.methods import TOP_1, Method
from pycomm.bench.training.results import describe, loss, pairs
from pycomm.bench.training.tasks import TASKS, Task, batch, rate

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
        Method("PowerSGD rank 4", codec="powersgd:4"),
        Method("LocalSGD, int4", local=LOCAL),
        # By default residuals of tensors as small as these are float32.
        Method("int4, residuals in bf16", codec="int4", feedback="residual:storage=bf16"),
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
    scheduler = torch.optim.lr_scheduler.LambdaLR(system.optimizer, lambda step: rate(task, step))
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
    method = METHODS[label]
    blank = describe(KIND, task, count, method)
    codec = method.local.get("codec", blank.codec)
    return replace(blank, codec=codec, seed=seed, steps=TASKS[task].steps, loss=loss)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the changes in percent, a line for each task; the first line names the methods.

    With several seeds a change is the mean over seeds, and the last cell is the spread of the exact
    losses among seeds: their standard deviation over their mean. The last two lines have the means
    over the tasks that constants were chosen on, and over those that were kept back.
    """
    exact = {
        task: [loss(row) for row, _ in pairs(EXACT, task, rows, kind=KIND, exact=EXACT)]
        for task in TASKS
    }
    changes = {
        (task, label): 100 * statistics.fmean(loss(a) / loss(b) - 1 for a, b in found)
        for task, label in itertools.product(TASKS, METHODS)
        if (found := pairs(label, task, rows, kind=KIND, exact=EXACT))
    }
    labels = [label for label in METHODS if label in {label for _, label in changes} - {EXACT}]
    lines = [["task", *labels, "spread of exact"]]
    for task in (task for task in TASKS if exact[task]):
        cells = [f"{changes[task, at]:+.1f}" if (task, at) in changes else "" for at in labels]
        spread = (
            statistics.stdev(exact[task]) / statistics.fmean(exact[task])
            if exact[task][1:]
            else None
        )
        lines.append([task, *cells, "" if spread is None else f"{100 * spread:.1f}"])
    for about, kept_back in (("mean", False), ("mean, kept back", True)):
        cells = []
        for label in labels:
            of = [task for task in TASKS if TASKS[task].kept_back == kept_back]
            found = [changes[task, label] for task in of if (task, label) in changes]
            cells.append(f"{statistics.fmean(found):+.1f}" if len(found) == len(of) else "")
        lines.append([about, *cells, ""])
    return lines
