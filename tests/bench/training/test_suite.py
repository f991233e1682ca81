"""The suite of small tasks: what is still to be trained, and what the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pycomm.bench.training import suite
from pycomm.bench.training.tasks import TASKS, batch, rate


def row(task: str, label: str, seed: int, loss: float):
    return suite.row(task, label, seed, loss, 1000)


def test_rows_that_are_there_are_not_trained_again():
    rows = [row("rows", "int8", 0, 1.0), replace(row("rows", "int8", 1, 1.0), kind="loss")]
    wanted = suite.missing(rows, ["rows", "even"], ["int8"], [0, 1])
    assert wanted == [("even", "int8", 0), ("rows", "int8", 1), ("even", "int8", 1)]


def test_a_table_has_the_mean_over_seeds():
    rows = [
        *(row("rows", "exact", seed, loss) for seed, loss in ((0, 1.0), (1, 2.0))),
        *(row("rows", "int8", seed, loss) for seed, loss in ((0, 1.1), (1, 2.6))),
        row("rows", "int8", 1, 2.4),  # the last one counts
        row("even", "int8", 0, 1.0),  # there is no exact one
    ]
    assert suite.table(rows) == [
        ["task", "int8", "spread of exact"],
        ["rows", "+15.0", "47.1"],
        ["mean", "", ""],  # of tasks that are not there
        ["mean, kept back", "", ""],
    ]


def test_means_are_of_the_tasks_that_were_kept_back_or_not():
    rows = [row(name, "exact", 0, 1.0) for name in TASKS]
    rows += [row(name, "int8", 0, 1.02 if TASKS[name].kept_back else 0.99) for name in TASKS]
    assert suite.table(rows)[-2:] == [["mean", "-1.0", ""], ["mean, kept back", "+2.0", ""]]


def test_methods_without_factors_are_for_uneven_tasks():
    wanted = suite.missing([], [*TASKS], ["int8", "int8, factors=off"], [0])
    without = [task for task, label, _ in wanted if label == "int8, factors=off"]
    assert without == [*suite.UNEVEN]
    assert len(wanted) == len(TASKS) + len(without)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_learns_from_batches_that_differ(name):
    task = TASKS[name]
    (x, y), (again, _) = batch(task, 1, 5, 0), batch(task, 1, 5, 0)
    assert torch.equal(x, again)
    for other in ((2, 5, 0), (1, 6, 0), (1, 5, 1)):
        assert not torch.equal(x, batch(task, *other)[0])
    torch.manual_seed(0)
    model = task.model()
    loss = task.loss(model(x), y)
    loss.backward()
    assert loss.isfinite()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert any(p.numel() >= 2048 and p.ndim > 1 for p in trained)  # which codecs code
    assert rate(task, task.steps // 20) == 1.0
    assert rate(task, task.steps) == pytest.approx(task.least)
