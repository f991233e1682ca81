"""Time to a loss: what is computed from measured losses and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin, Row, record
from pycomm.bench.training.methods import METHODS, Method
from pycomm.bench.training.results import (
    EXACT,
    EXACT_SGD,
    changes,
    describe,
    exact_of,
    load,
    steps_to_exact,
    steps_to_loss,
)
from pycomm.bench.training.train import Config, Transformer

FP16 = next(method for method in METHODS if method.hook == "fp16")
INT4 = next(method for method in METHODS if method.codec == "int4")


def row(kind: str, method: Method, **values: object) -> Row:
    return replace(describe(kind, "demo", 1000, method), **values)


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


def test_methods_of_sgd_are_compared_with_exact_sgd():
    for method in METHODS:
        wanted = EXACT_SGD if method.sgd else EXACT
        assert exact_of(method.label) == wanted.label


def test_local_methods_average_by_rounds(tmp_path):
    dist.init_process_group("pycomm", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for method in METHODS:
            if not method.local:
                continue
            model = Transformer(Config(layers=2, width=32))
            optimizer, finish = method.optimizer(model, 1e-3, (0.9, 0.95))
            for _ in range(method.local["every"] + 1):
                model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            finish()
    finally:
        dist.destroy_process_group()


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [
        row("loss", INT4, seed=1, steps=20, loss=2.5, curve="10:3.0"),
        row("step", INT4, rate="1gbit", seconds=0.25, wire_bytes=10.0),
    ]
    for each in [*rows, row("total", INT4)]:
        tables.append(path, [record(each, Origin.here("test"))])
    assert load(path) == rows
