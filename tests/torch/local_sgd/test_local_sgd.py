"""Local SGD and DiLoCo: equal to plain averaging where expected; equal ranks after outer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm
from pycomm.local_sgd import Blocking
from tests.torch.harness import (
    alike,
    all_equal,
    batch,
    equal,
    near_zero,
    network,
    residuals_of,
    train_step,
    values,
)
from tests.torch.pool import on_ranks

PLAIN = {"codec": "fp32", "lr": 1.0, "momentum": 0.0}


def train(
    rank: int, size: int, steps: int, options: dict[str, Any], inner: float = 0.1
) -> tuple[list[torch.Tensor], list[float], bool]:
    """Return parameters, losses, and whether ranks were equal after each outer step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=inner)
    local = pycomm.LocalSGD(model, **options)
    losses, equal_then = [], True
    for step in range(steps):
        losses.append(train_step(model, optimizer, rank, step))
        if local.step():
            equal_then = alike(*values(model)) and equal_then
    local.finish()
    return values(model), losses, equal_then


@on_ranks(3)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_without_momentum_it_averages_parameters(rank, size):
    options = {"every": 4, **PLAIN}
    got, _, equal_then = train(rank, size, 8, options)
    assert equal_then
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        train_step(model, optimizer, rank, step)
        if step % 4 == 3:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= size
    # start - mean(start - end) rounds twice where mean(end) rounds once.
    near_zero(*(a - b for a, b in zip(got, values(model), strict=True)), atol=1e-6)


CONVERGES = [
    {"codec": "fp32"},
    {"codec": "int8"},
    {"codec": "int4"},
    {"codec": "powersgd:4"},
    {"codec": "int8", "lr": 1.0, "momentum": 0.0},
]


@pytest.mark.parametrize("options", CONVERGES, ids=str)
def test_it_converges_and_ranks_are_equal(pool, options):
    results = pool.run(train, 80, {"every": 4, **options})
    (a, losses, equal_then), (b, more, _) = results
    assert equal_then
    assert equal(a, b)
    # The loss started at ln 10 = 2.3; training step by step reaches 0.9 after 60 steps.
    assert sum(losses[-8:] + more[-8:]) / 16 < 1.3


def test_int4_with_feedback_ends_near_exact(pool):
    (exact, _, _), *_ = pool.run(train, 40, {"every": 4, "codec": "fp32"})
    (fed, _, _), *_ = pool.run(train, 40, {"every": 4, "codec": "int4"})
    (plain, _, _), *_ = pool.run(train, 40, {"every": 4, "codec": "int4", "feedback": False})

    def off(parameters: list[torch.Tensor]) -> float:
        pairs = list(zip(parameters, exact, strict=True))
        moved = [e - s for e, s in zip(exact, values(network()), strict=True)]
        return float(
            sum((p - e).square().sum() for p, e in pairs) / sum(m.square().sum() for m in moved)
        )

    assert off(fed) < 0.02  # relative to the distance that training has moved, squared
    assert not equal(plain, fed)


@on_ranks(1)
def test_options_stay_as_the_ranks_agreed(rank, size):
    local = pycomm.LocalSGD(nn.Linear(2, 2), every=4)
    for name, value in (
        *(("every", 2), ("exchange", Blocking()), ("lr", 0.1), ("momentum", 0.5)),
        *(("nesterov", False), ("weighted", True), ("average", "senders")),
    ):
        before = getattr(local, name)
        with pytest.raises(AttributeError, match=f"LocalSGD: {name} stays"):
            setattr(local, name, value)
        assert getattr(local, name) is before


@on_ranks(2)
def test_a_context_manager_counts_steps(rank, size):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pycomm.LocalSGD(model, every=4, codec="int8", optimizer=optimizer) as local:
        for step in range(10):
            train_step(model, optimizer, rank, step)
        assert (local.rounds, local.local_steps) == (2, 2)
    assert (local.rounds, local.local_steps) == (3, 0)
    train_step(model, optimizer, rank, 10)
    assert local.local_steps == 0
    with pytest.raises(pycomm.Error, match="pass optimizer="):
        pycomm.LocalSGD(model, every=4).__enter__()


@on_ranks(2)
def test_a_round_that_is_not_finite_leaves_no_trace(rank, size):
    model = network()
    local = pycomm.LocalSGD(model, every=1, codec="int8")
    with torch.no_grad():
        model[0].weight += 0.1 * (rank + 1)
    local.step()
    before, owed = values(model), residuals_of(local.state.state_dict())
    with torch.no_grad():
        model[0].weight += 0.1
        if rank == 0:
            model[0].weight[0, 0] = float("nan")
    local.step()
    assert (local.rounds, local.skipped) == (2, 1)
    assert equal(values(model), before)
    assert equal(residuals_of(local.state.state_dict()), owed)


@on_ranks(2)
def test_ranks_start_from_the_first_ranks_parameters(rank, size):
    torch.manual_seed(rank)
    model = nn.Linear(8, 8)
    pycomm.LocalSGD(model, every=4)
    assert alike(model.weight)
    with pytest.raises(ValueError, match="every=0"):
        pycomm.LocalSGD(model, every=0)


@on_ranks(4, then=all_equal)
def test_shards_of_fsdp2_meet_between_groups(rank, size):
    """Two groups of two ranks: FSDP2 inside, local SGD between them; in bfloat16."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "shard"))
    model = fully_shard(network().bfloat16(), mesh=mesh["shard"])
    local = pycomm.LocalSGD(model, every=2, codec="int8", process_group=mesh.get_group("apart"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        x, y = batch(rank, step)
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    assert model[0].weight.dtype == torch.bfloat16
    return values(model)
