"""The demo's training compares fairly: same data in every run, nothing held out is trained on."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, islice

import pytest
import torch
import torch.distributed as dist

from pycomm.bench.common.harness import Row
from pycomm.bench.training import suite, time_to_loss
from pycomm.bench.training import train as training
from pycomm.bench.training.methods import METHODS, Method
from pycomm.bench.training.results import EXACT, changes, describe, steps_to_exact, steps_to_loss
from pycomm.bench.training.tasks import TASKS, batch
from pycomm.bench.training.train import (
    Config,
    Transformer,
    batches,
    schedule,
    standard_library,
    take_turns,
)

CONFIG = Config()


def test_held_out_files_are_not_trained_on():
    train, held_out = (bytes(part.numpy()) for part in standard_library(limit=2 << 20))
    probes = [held_out[start : start + 200] for start in range(0, len(held_out) - 200, 4001)]
    assert len(probes) > 10
    # Licences and the like stand in several files; 200 bytes of code do not.
    assert sum(probe in train for probe in probes) <= len(probes) // 10


def test_every_run_sees_the_data_in_one_order():
    text = torch.arange(100_000, dtype=torch.int32)
    first, again = (list(islice(batches(text, CONFIG, 0, 2), 5)) for _ in range(2))
    other = list(islice(batches(text, CONFIG, 1, 2), 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert first[0].shape == (CONFIG.batch, CONFIG.context + 1)


def test_runs_take_turns(monkeypatch):
    """Ten steps each; another run begins each round, and no record is lost."""

    def train(config, method, group, device):
        assert device == "cpu"
        assert group == f"group of {method.backend}"
        yield from ({"step": step} for step in range(1, config.steps + 1))
        yield {"step_seconds": 1.0}

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training.dist, "new_group", lambda backend: f"group of {backend}")
    methods = [Method("", "gloo"), Method("", "pycomm"), Method("", "pycomm", "int8")]
    rows = [*take_turns(Config(steps=30), methods)]
    turns = [(turn, len([*some])) for turn, some in groupby(row["turn"] for row in rows)]
    assert turns == [(0, 10), (1, 10), (2, 10), (1, 10), (2, 10), (0, 10), (2, 10), (0, 10),
                     (1, 10), (0, 1), (1, 1), (2, 1)]  # fmt: skip
    for turn in range(3):
        own = [row.get("step") for row in rows if row["turn"] == turn]
        assert own == [*range(1, 31), None]


def test_the_learning_rate_rises_and_falls_to_one_that_stays():
    assert [schedule(step, 100, 10, 0.5) for step in (0, 10, 100, 200)] == [0.1, 1.0, 0.5, 0.5]


# -------------------------------------------------------------------------------------------- tasks
# The suite of small tasks: what is still to be trained, and what the table says.


def trained(task: str, label: str, seed: int, loss: float) -> Row:
    return suite.row(task, label, seed, loss, 1000)


def test_rows_that_are_there_are_not_trained_again():
    rows = [trained("rows", "int8", 0, 1.0), replace(trained("rows", "int8", 1, 1.0), kind="loss")]
    wanted = suite.missing(rows, ["rows", "even"], ["int8"], [0, 1])
    assert wanted == [("even", "int8", 0), ("rows", "int8", 1), ("even", "int8", 1)]


def test_a_change_is_the_mean_over_seeds():
    rows = [
        *(trained("rows", "exact", seed, loss) for seed, loss in ((0, 1.0), (1, 2.0))),
        *(trained("rows", "int8", seed, loss) for seed, loss in ((0, 1.1), (1, 2.6))),
        trained("rows", "int8", 1, 2.4),  # the last one counts
        trained("even", "int8", 0, 1.0),  # there is no exact one
    ]
    assert suite.changes(rows) == (
        {"int8": {"rows": pytest.approx(15)}},
        {"rows": pytest.approx(47.1, abs=0.05)},
    )
    last = suite.table(rows).splitlines()[-1]  # without means of tasks that are not there
    assert last == "| int8 |  | +15.0 |  |  | +15.0 | rows | 47.1 |"


def test_means_are_of_the_tasks_that_were_kept_back_or_not():
    of = {name: 2.0 if task.kept_back else -1.0 for name, task in TASKS.items()}
    assert [suite.mean(of, kept_back=kept_back) for kept_back in (False, True)] == [-1.0, 2.0]


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


# ----------------------------------------------------------------------------------- time to a loss
# Time to a loss: what is computed from measured losses and steps.


FP16 = next(method for method in METHODS if method.hook == "fp16")
INT4 = next(method for method in METHODS if method.codec == "int4")


def row(kind: str, method: Method, **values: object) -> Row:
    return replace(describe(kind, "demo", 1000, method), **values)


def test_a_row_names_the_codec_that_travels():
    codecs = {method.label: describe("loss", "demo", 1000, method).codec for method in METHODS}
    assert codecs["pycomm, coded momentum, int4"] == codecs["LocalSGD, int4"] == "int4"
    assert codecs["pycomm, exact"] == "none"


def test_steps_to_a_loss_are_found_between_evaluations():
    assert steps_to_loss([{10: 4.0, 20: 2.0}], 3.0) == 15
    assert steps_to_loss([{10: 4.0, 20: 2.0}, {10: 4.0, 20: 3.0}], 2.5) == 20  # of the mean
    assert steps_to_loss([{10: 4.0, 20: 2.0}], 1.0) is None


def test_steps_count_until_the_loss_of_the_float32_run():
    rows = [
        row("loss", EXACT, seed=0, steps=20, loss=2.0, curve="10:3.0 20:2.0"),
        row("loss", FP16, seed=0, steps=20, loss=2.0, curve="10:3.0 20:2.0"),
        row("loss", INT4, seed=0, steps=20, loss=2.1, curve="10:3.0 20:2.1 30:1.9"),
    ]
    assert steps_to_exact(FP16.label, "demo", rows) == 20.0
    # Half-way from 2.1 to 1.9.
    assert steps_to_exact(INT4.label, "demo", rows) == pytest.approx(25.0)
    assert changes(INT4.label, "demo", rows) == [pytest.approx(0.05)]


def test_losses_are_compared_on_the_same_text():
    """One taken on less text is held against the curve, which both have on equally much."""
    rows = [
        row("loss", EXACT, seed=0, steps=20, windows=2048, loss=2.0, curve="10:3.0 20:2.5"),
        row("loss", INT4, seed=0, steps=20, windows=2048, loss=2.1, curve="10:3.0 20:9.9"),
        row("loss", FP16, seed=0, steps=20, windows=256, loss=2.6, curve="10:3.0 20:2.6"),
        row("loss", FP16, seed=1, steps=20, windows=256, loss=9.9, curve="10:3.0 20:9.9"),
    ]
    assert changes(INT4.label, "demo", rows) == [pytest.approx(0.05)]
    assert changes(FP16.label, "demo", rows) == [pytest.approx(0.04)]  # seed 1 has no exact run
    assert changes(EXACT.label, "demo", rows) == [0.0]


def test_bytes_of_streams_count_which_have_a_group_of_their_own():
    method = next(method for method in METHODS if method.label == "LocalSGD, SparseLoCo in streams")
    config = Config(layers=1, width=32, steps=40, evaluate_every=40)
    rows = time_to_loss.train(2, training.ranks_train, config, [method])
    assert rows[-2]["mean_wire_bytes"] > 0


def test_local_methods_average_by_rounds(tmp_path):
    dist.init_process_group("pycomm", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for method in METHODS:
            if not method.local:
                continue
            model = Transformer(Config(layers=2, width=32))
            system = method.start(model, 1e-3, (0.9, 0.95))
            for _ in range(method.local["every"] + 1):
                model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
                system.apply()
            system.finish()
    finally:
        dist.destroy_process_group()
