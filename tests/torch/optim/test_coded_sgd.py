"""CodedSGD beside torch's SGD; its formula is in test_coded_adamw.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.torch.harness import equal, values
from tests.torch.optim import table
from tests.torch.optim.table import gradients, integers
from tests.torch.pool import on_ranks

SIZES = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}


@on_ranks(2)
@pytest.mark.parametrize("which", ["sgd", "sgd on shards"])
@pytest.mark.parametrize("changes", ["at once", "one cycle"])
def test_a_schedule_of_the_momentum_stays_near_that_of_torch(rank, size, which, changes):
    """Values move as far in the same direction: what is kept has the unit of torch's buffer."""
    found = []
    for is_coded in (True, False):
        model = table.wrap(which, table.net())
        make: Any = (
            table.coded
            if is_coded
            else lambda w, m, codec, **o: table.plain(w, m.parameters(), **o)
        )
        optimizer = make(which, model, codec="int4", **{**SIZES, "weight_decay": 1e-3})
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40)
        before = values(model)
        for step in range(40):
            if changes == "at once":
                optimizer.param_groups[0].update(lr=0.01, momentum=0.9 if step < 20 else 0.5)
            common = integers(0, step)
            given = {n: common[n] + g for n, g in gradients(rank, step).items()}
            table.step(model, optimizer, given)
            if changes == "one cycle" and step < 39:
                cycle.step()
        found.append([a - b for a, b in zip(values(model), before, strict=True)])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.05


@on_ranks(2)
@pytest.mark.parametrize("which", ["sgd", "sgd on shards"])
def test_weight_decay_is_that_of_torch(rank, size, which):
    """Of a matrix without gradients, which also has a momentum in torch's SGD."""
    found = []
    for is_coded in (True, False):
        model = table.wrap(which, table.net())
        options = {**SIZES, "lr": 1e-3}
        make: Any = table.coded if is_coded else table.plain
        optimizer = make(which, model if is_coded else model.parameters(), **options)
        for _ in range(100):
            zeros = {name: torch.zeros(shape) for name, shape in table.SHAPES.items()}
            table.step(model, optimizer, zeros)
        found.append(values(model))
    for ours, theirs in zip(*found, strict=True):
        # Both are 0.9 of what they were; torch's begins ten steps later.
        assert ours.norm() / theirs.norm() == pytest.approx(1.0, abs=0.012)


@on_ranks(2)
@pytest.mark.parametrize("codec", ["fp32", "sign"])
def test_a_float64_parameter_keeps_its_digits(rank, size, codec):
    """It is exact whatever the codec."""
    model, plain = (table.wrap("sgd", table.net().double()) for _ in range(2))
    one = table.coded("sgd", model, codec=codec, lr=2.0**-24)
    two = table.plain("sgd", plain.parameters(), lr=2.0**-24)
    for step in range(3):
        given = {name: g.double() for name, g in gradients(rank, step).items()}
        table.step(model, one, given)
        table.step(plain, two, given)
    assert equal(values(model), values(plain))


@on_ranks(4)
@pytest.mark.parametrize("which", ["sgd", "sgd on shards"])
def test_gradients_that_come_now_and_then_on_one_rank_count_whole(rank, size, which):
    """Those of an expert: nothing divides the step, so what is cut would be missing."""
    model, plain = (table.wrap(which, table.net()) for _ in range(2))
    sizes = {**SIZES, "weight_decay": 0.0}
    one = table.coded(which, model, codec="int8", **sizes)
    two = torch.optim.SGD(plain.parameters(), **sizes)
    before = values(model)
    for step in range(120):
        much = 1.0 if rank == 1 and step % 30 == 0 else 1e-3
        given = {name: much * g for name, g in gradients(rank, step).items()}
        table.step(model, one, given)
        table.step(plain, two, given)
    moved = [[a - b for a, b in zip(values(m), before, strict=True)] for m in (model, plain)]
    for ours, theirs in zip(*moved, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.1


@on_ranks(2)
def test_a_state_of_torch_without_a_momentum_is_loaded(rank, size):
    model, optimizer = table.make("sgd")
    saved = optimizer.to_sgd().state_dict()
    numbers = range(len(saved["param_groups"][0]["params"]))
    saved["state"] = {number: {"momentum_buffer": None} for number in numbers}
    optimizer.load_state_dict(saved)
    table.train(model, optimizer, rank, range(2))
    assert all(state["momentum_buffer"].any() for state in optimizer.state.values())
