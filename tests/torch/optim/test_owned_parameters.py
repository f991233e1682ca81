"""Parameters that a coded optimizer does not have, gets later, or that are frozen and thawed: ranks
keep equal parameters, or get an error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from tests.torch.harness import all_equal, equal
from tests.torch.pool import on_ranks

Make = Callable[..., Any]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params, model, **more: pycomm.CodedAdamW(params, 1e-3, model=model, **more),
    "sgd": lambda params, model, **more: pycomm.CodedSGD(params, 1e-2, model=model, **more),
}
every = pytest.mark.parametrize("which", OPTIMIZERS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80), nn.Linear(80, 40))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * step + rank))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, optimizers: Any, rank: int, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        x = batch(rank, step)
        (model(x) - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


# ---------------------------------------------------------------- other optimizers' parameters


@on_ranks(2, then=all_equal)
@every
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-6])  # one bucket for all, and one for each
def test_parameters_of_another_optimizer_are_averaged(rank, size, which, bucket_mb):
    model = DistributedDataParallel(net(), bucket_cap_mb=bucket_mb)
    parts = list(model.parameters())
    coded = OPTIMIZERS[which]([p for p in parts if p.ndim > 1], model)
    other = torch.optim.SGD([p for p in parts if p.ndim == 1], lr=0.1)
    before = values(model)
    train(model, (coded, other), rank, range(5))
    assert not any(map(torch.equal, before, values(model)))
    return values(model)


@on_ranks(2)
def test_others_gradients_are_those_of_ddp(rank, size):
    """What CodedSGD does not have gets the gradients of DDP without a hook, to the bit."""
    gradients = []
    for coded in (True, False):
        model = DistributedDataParallel(net())
        if coded:
            pycomm.CodedSGD([model.module[0].weight], model=model)
        (model(batch(rank, 0))).square().mean().backward()
        gradients.append([p.grad.clone() for p in list(model.parameters())[1:]])
    assert equal(*gradients)


@on_ranks(2, then=all_equal)
def test_another_optimizers_sparse_gradients_are_averaged(rank, size):
    torch.manual_seed(0)
    words, line = nn.Embedding(9, 40, sparse=True), nn.Linear(40, 40)
    model = DistributedDataParallel(nn.Sequential(words, line))
    coded = pycomm.CodedSGD(line.parameters(), model=model)
    other = torch.optim.SGD(words.parameters(), lr=0.1)
    for step in range(3):
        model.zero_grad()
        model(torch.tensor([rank, 2 + step])).square().mean().backward()
        coded.step()
        other.step()
    return values(model)


def scaled(rank: int, size: int, which: str) -> tuple[list[torch.Tensor], float]:
    """An overflow of a coded parameter, while another optimizer has finite gradients."""
    model = DistributedDataParallel(net(), bucket_cap_mb=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    parts = list(model.parameters())
    coded = OPTIMIZERS[which](parts[2:], model, scaler=scaler)
    other = torch.optim.SGD(parts[:2], lr=0.1)
    for step in range(4):
        model.zero_grad()
        x = batch(rank, step)
        if step == 2 and rank == 1:
            handle = model.module[3].weight.register_hook(lambda g: g * torch.inf)
        scaler.scale((model(x) - x).square().mean()).backward()
        if step == 2 and rank == 1:
            handle.remove()
        for optimizer in (coded, other):
            scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in parts)
    return values(model), scaler.get_scale()


@every
def test_an_overflow_beside_another_optimizer(pool, which):
    (first, one), (second, two) = pool.run(scaled, which)
    assert one == two == 512
    assert equal(first, second)


# ---------------------------------------------------------------- groups that come later


@on_ranks(2, then=all_equal)
@every
@pytest.mark.parametrize("when", ["after a step", "after a backward", "before a step"])
def test_a_group_that_is_added_later_travels_coded(rank, size, which, when):
    model = DistributedDataParallel(net())
    parts = list(model.parameters())
    optimizer = OPTIMIZERS[which](parts[2:], model)
    train(model, [optimizer], rank, range(3))
    before = values(model)
    if when != "after a step":
        (model(batch(rank, 50))).square().mean().backward()
    optimizer.add_param_group({"params": parts[:2], "lr": 1e-2})
    if when == "before a step":  # which they take as exact ones
        optimizer.step()
    train(model, [optimizer], rank, range(3, 8))
    assert not any(map(torch.equal, before, values(model)))
    state = optimizer.compression
    assert state.decisions["0.weight"].codec.name == "sign"
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
    train(model, [optimizer], rank, range(8, 12))
    again = DistributedDataParallel(net())
    loaded = OPTIMIZERS[which](list(again.parameters())[2:], again)
    loaded.add_param_group({"params": list(again.parameters())[:2]})
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    loaded.compression.load_state_dict(saved[2])
    train(again, [loaded], rank, range(8, 12))
    if which == "sgd":  # of AdamW the squares since the last exchange begin anew
        assert equal(values(model), values(again))
    return values(model)


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("when", ["after a step", "before a step"])
def test_a_later_group_of_shards_travels_coded(rank, size, when):
    model: Any = fully_shard(net())
    parts = list(model.parameters())
    optimizer = OPTIMIZERS["adamw"](parts[2:], model)
    train(model, [optimizer], rank, range(3))
    if when == "before a step":
        (model(batch(rank, 50))).square().mean().backward()
    optimizer.add_param_group({"params": parts[:2]})
    if when == "before a step":
        optimizer.step()
        train(model, [optimizer], rank, range(2, 3))
    assert optimizer.compression.decisions["0.weight"].codec.name == "sign"
    before = parts[0].full_tensor()
    train(model, [optimizer], rank, range(3, 6))
    assert not torch.equal(before, parts[0].full_tensor())
    assert "row" in optimizer.state[parts[0]]
    return [p.full_tensor().detach() for p in parts]


def adds_wrongly(rank: int, size: int, which: str) -> list[str]:
    model = DistributedDataParallel(net())
    parts = list(model.parameters())
    optimizer = OPTIMIZERS[which](parts[2:], model)
    texts = []
    for group in (
        {"params": nn.Linear(3, 3).parameters()},
        {"params": parts[:2], "lr": -1.0},
        {"params": parts[:2], "lr": 0.1 + rank},
    ):
        try:
            optimizer.add_param_group(group)
        except (Error, ValueError) as error:
            texts.append(str(error))
        assert len(optimizer.param_groups) == 1
    train(model, [optimizer], rank, range(2))
    return texts


@every
def test_a_group_that_does_not_fit_is_refused(pool, which):
    for texts in pool.run(adds_wrongly, which):
        words = ("does not belong", "lr=-1.0", "rank")
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts


# ---------------------------------------------------------------- freeze and thaw


@on_ranks(2, then=all_equal)
@every
@pytest.mark.parametrize("to_none", [True, False])
def test_a_layer_is_frozen_and_thawed(rank, size, which, to_none):
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = OPTIMIZERS[which](model.parameters(), model)
    for step in range(9):
        model.module[0].requires_grad_(not 3 <= step < 6)
        optimizer.zero_grad(set_to_none=to_none)
        before = values(model)
        x = batch(rank, step)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        moved = not torch.equal(before[0], model.module[0].weight)
        assert moved or 3 <= step < 6
        assert not (moved and to_none) or not 3 <= step < 6
    return values(model)


@on_ranks(2, then=all_equal)
@every
def test_a_layer_frozen_at_construction(rank, size, which):
    """Frozen when the optimizer is made, and not when the model is wrapped."""
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    model.module[0].requires_grad_(False)
    optimizer = OPTIMIZERS[which](model.parameters(), model)
    train(model, [optimizer], rank, range(2))
    model.module[0].requires_grad_(True)
    before = values(model)
    train(model, [optimizer], rank, range(2, 5))
    assert not torch.equal(before[0], model.module[0].weight)
    return values(model)


def frozen_while_wrapped(rank: int, size: int, which: str) -> Any:
    """DDP never averages a parameter that was frozen when the model was wrapped."""
    inner = net()
    inner[0].requires_grad_(False)
    model = DistributedDataParallel(inner)
    optimizer = OPTIMIZERS[which](model.parameters(), model)
    train(model, [optimizer], rank, range(2))
    inner[0].requires_grad_(True)
    try:
        train(model, [optimizer], rank, range(2, 5))
    except Error as error:
        return str(error)
    return values(model)


@every
def test_a_layer_frozen_at_wrapping(pool, which):
    first, second = pool.run(frozen_while_wrapped, which)
    if which == "sgd":  # whose step averages what it has
        assert equal(first, second)
    else:
        assert "0.weight was frozen when the model was wrapped" in first
        assert "0.weight was frozen when the model was wrapped" in second


def ignored(rank: int, size: int) -> str:
    inner = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    model = DistributedDataParallel(inner)
    pycomm.CodedSGD(list(model.parameters())[1:], model=model)
    other = DistributedDataParallel(inner)
    try:
        pycomm.CodedSGD(other.parameters(), model=other)
    except ValueError as error:
        return str(error)
    return ""


def test_sgd_refuses_what_ranks_have_for_themselves(pool):
    assert all("ignores 0.weight" in text for text in pool.run(ignored))


# ---------------------------------------------------------------- copies


@on_ranks(2)
def test_models_with_every_hook_are_copied_and_saved(rank, size):
    attached: dict[str, Callable[[DistributedDataParallel], Any]] = {
        "compress": lambda model: pycomm.compress(model, "int4"),
        **{
            name: lambda model, make=make: make(model.parameters(), model)
            for name, make in OPTIMIZERS.items()
        },
    }
    for name, attach in attached.items():
        model = DistributedDataParallel(net())
        optimizer = attach(model)
        if name == "compress":
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, [optimizer], rank, range(2))
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        for copied in (copy.deepcopy(model), torch.load(written, weights_only=False)):
            assert equal(values(copied), values(model))
            copied(batch(rank, 0)).square().mean().backward()
            attach(copied)  # a copy has no hook, and takes one
        train(model, [optimizer], rank, range(2, 4))
