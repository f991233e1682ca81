"""Local SGD and DiLoCo: equal to plain averaging where expected; equal ranks after outer steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm
from pycomm.local_sgd import Blocking, Streamed
from tests.torch.harness import (
    alike,
    all_equal,
    batch,
    check_sum,
    equal,
    heard,
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


@on_ranks(1)
def test_options_stay_as_the_ranks_agreed(rank, size):
    local = pycomm.LocalSGD(nn.Linear(2, 2), every=4)
    for name, value in (
        *(("every", 2), ("exchange", Blocking()), ("lr", 0.1), ("momentum", 0.5)),
        *(("weighted", True), ("average", "senders")),
    ):
        before = getattr(local, name)
        with pytest.raises(AttributeError, match=f"LocalSGD: {name} stays"):
            setattr(local, name, value)
        assert getattr(local, name) is before


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
        with torch.no_grad():
            model(x.bfloat16())  # leaves whole parameters
        local.step()
    local.finish()
    assert model[0].weight.dtype == torch.bfloat16
    return values(model)


# ------------------------------------------------------------------------------------- unlike steps
# One rank has a gradient that is not finite, or takes fewer steps than the others.


FORMS = {
    "blocking": {"exchange": Blocking()},
    "fragments": {"exchange": Streamed(2, overlap=0)},
    "overlapped fragments": {"exchange": Streamed(2, overlap=1)},
    "a round later": {"exchange": Streamed(overlap=4)},
    "on a thread": {"exchange": Streamed(2, overlap=2), "weighted": True},
}


@on_ranks(2)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_one_gradient_of_nan_costs_one_round(rank, size, options):
    """Rank 1 has one gradient of NaN; with AdamW that once cost all rounds that followed."""
    with heard(logging.WARNING) as lines:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        local = pycomm.LocalSGD(model, every=4, codec="int8", **options)
        for step in range(32):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if rank == 1 and step == 5:
                model[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
            local.step(*(len(x),) if local.weighted else ())
        local.finish()
    assert 1 <= local.skipped <= 2 < local.rounds  # two fragments may have it
    assert all(value.isfinite().all() for value in values(model))
    assert alike(*values(model))
    skipped = [text for text in lines if "LocalSGD skips round" in text]
    assert len(skipped) == local.skipped
    assert all("the outer gradient of rank 1 is not" in text for text in skipped)
    reset = [text for text in lines if "has reset the inner optimizer's state" in text]
    assert [text.partition(":")[0] for text in reset] == (["rank 1"] if rank else [])
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())
        assert state["step"] > 0


@on_ranks(2)
@pytest.mark.parametrize(
    ("form", "overflows"),
    [
        ("blocking", (0,)),
        ("blocking", (0, 2, 3, 5, 6)),
        ("fragments", (3,)),
        ("overlapped fragments", (0, 2, 3, 5, 6)),
        ("a round later", (0,)),
    ],
)
def test_ranks_that_skip_steps_finish_with_the_others(rank, size, form, overflows):
    """A GradScaler skips steps of rank 1, which the optimizer's hook does not count."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    local = pycomm.LocalSGD(model, every=4, codec="int8", **FORMS[form])
    optimizer.register_step_post_hook(lambda *_: local.step())
    for step in range(9):
        x, y = batch(rank, step)
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * float("inf" if rank == 1 and step in overflows else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    local.finish()
    assert local.local_steps == 0
    assert local.skipped == 0
    assert alike(*values(model))
    check_sum()


@on_ranks(3)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_ranks_of_different_numbers_of_steps_end_equal(rank, size, options):
    model = network()
    local = pycomm.LocalSGD(model, every=4, codec="fp32", **options)
    for _ in range((0, 3, 14)[rank]):
        with torch.no_grad():
            model[0].weight += 0.1 * (1 + rank)
        local.step(*(1,) if local.weighted else ())
    local.finish()
    assert alike(*values(model))
    local.finish()  # with nothing to do
    assert alike(*values(model))
