"""Parameters that a coded optimizer does not have, gets later, or that are frozen and thawed: ranks
keep equal parameters, or get an error. And copies of models whose hooks it has made."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pycomm.errors import Error
from tests.torch.harness import all_equal, equal, values, whole
from tests.torch.optim.table import (
    coded,
    gradients,
    make,
    named,
    net,
    rows,
    train,
    wrap,
)
from tests.torch.pool import on_ranks


def parts_of(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the first parameter, and the others."""
    first, *others = model.parameters()
    return [first], others


# ---------------------------------------------------------------- other optimizers' parameters


@on_ranks(then=all_equal)
@rows()
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-6])  # one bucket for all, and one for each
def test_parameters_of_another_optimizer_are_averaged(rank, size, which, bucket_mb):
    """With the gradients of a model without a hook, to the bit."""
    model, plain = (wrap(which, net(), bucket_cap_mb=bucket_mb) for _ in range(2))
    (first, *_), others = parts_of(model)
    optimizer = coded(which, model, others)
    other = torch.optim.SGD([first], lr=0.1)
    before = values(model)
    for number in range(5):
        for one in (model, plain):
            one.zero_grad()
            one(gradients(rank, number)).backward()
        mean = whole(next(plain.parameters()).grad)
        # DDP divides before the sum, which of more than two ranks is another rounding.
        if size == 2:
            assert torch.equal(whole(first.grad), mean)
        torch.testing.assert_close(whole(first.grad), mean)
        optimizer.step()
        other.step()
    assert not any(map(torch.equal, before, values(model)))
    return values(model)


@on_ranks(then=all_equal)
@rows()
def test_an_overflow_beside_another_optimizer(rank, size, which):
    """An overflow of a coded parameter, while another optimizer has finite gradients."""
    model = wrap(which, net(), bucket_cap_mb=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    first, others = parts_of(model)
    optimizer = coded(which, model, others, scaler=scaler)
    other = torch.optim.SGD(first, lr=0.1)
    for number in range(4):
        model.zero_grad()
        given = gradients(rank, number)
        if number == 2 and rank == 1:
            given["small"][3, 4] = torch.inf
        scaler.scale(model(given)).backward()
        for each in (optimizer, other):
            scaler.step(each)
        scaler.update()
    assert all(one.isfinite().all() for one in values(model))
    assert scaler.get_scale() == 512
    return values(model)


# ---------------------------------------------------------------- groups that come later


@on_ranks(then=all_equal)
@rows()
@pytest.mark.parametrize("when", ["after a step", "after a backward", "before a step"])
def test_a_group_that_is_added_later_travels_coded(rank, size, which, when):
    model = wrap(which, net())
    first, others = parts_of(model)
    optimizer = coded(which, model, others, refresh=1)
    train(model, optimizer, rank, range(3))
    before = values(model)
    if when != "after a step":
        model(gradients(rank, 50)).backward()
    optimizer.add_param_group({"params": first, "lr": 1e-2})
    if when == "before a step":  # which they take as exact ones
        optimizer.step()
    train(model, optimizer, rank, range(3, 8))
    assert not any(map(torch.equal, before, values(model)))
    state = optimizer.compression
    assert state.decisions["big"].codec.name == "sign"
    assert "row" in optimizer.state[first[0]]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
    train(model, optimizer, rank, range(8, 12))
    again = wrap(which, net())
    first, others = parts_of(again)
    loaded = coded(which, again, others, refresh=1)
    loaded.add_param_group({"params": first})
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    loaded.compression.load_state_dict(saved[2])
    train(again, loaded, rank, range(8, 12))
    assert equal(values(model), values(again))
    return values(model)


@on_ranks()
@rows()
def test_a_group_that_does_not_fit_is_refused(rank, size, which):
    model = wrap(which, net())
    first, others = parts_of(model)
    optimizer = coded(which, model, others)
    for group, words in (
        ({"params": nn.Linear(3, 3).parameters()}, "does not belong"),
        ({"params": first, "lr": -1.0}, "lr=-1.0"),
        ({"params": first, "lr": 0.1 + rank}, r"rank 1 has .*'lr': 1\.1"),
    ):
        with pytest.raises((Error, ValueError), match=words):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    train(model, optimizer, rank, range(2))


# ---------------------------------------------------------------- freeze and thaw


@on_ranks(then=all_equal)
@rows()
@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_is_frozen_and_thawed(rank, size, which, to_none):
    model, optimizer = make(which)
    big = named(model)["big"]
    for number in range(9):
        frozen = 3 <= number < 6
        big.requires_grad_(not frozen)
        optimizer.zero_grad(set_to_none=to_none)
        before = values(model)
        model(gradients(rank, number)).backward()
        optimizer.step()
        moved = not torch.equal(before[0], whole(big))
        assert moved or frozen
        assert not (moved and to_none and frozen)
    return values(model)


@on_ranks(then=all_equal)
@rows()
def test_a_parameter_frozen_at_construction(rank, size, which):
    """Frozen when the optimizer is made, and not when the model is wrapped."""
    model = wrap(which, net())
    named(model)["big"].requires_grad_(False)
    optimizer = coded(which, model)
    train(model, optimizer, rank, range(2))
    named(model)["big"].requires_grad_(True)
    before = values(model)
    train(model, optimizer, rank, range(2, 5))
    assert not torch.equal(before[0], values(model)[0])
    return values(model)


@on_ranks(then=all_equal)
@rows()
def test_a_parameter_frozen_at_wrapping(rank, size, which):
    """DDP never averages it, which is refused."""
    inner = net()
    inner.big.requires_grad_(False)
    model = wrap(which, inner)
    optimizer = coded(which, model)
    train(model, optimizer, rank, range(2))
    named(model)["big"].requires_grad_(True)
    if " on " not in which:
        with pytest.raises(Error, match="big was frozen when the model was wrapped"):
            train(model, optimizer, rank, range(2, 5))
    else:
        train(model, optimizer, rank, range(2, 5))
    return values(model)


# ---------------------------------------------------------------- copies and averages


@on_ranks(2)
@pytest.mark.parametrize("which", ["adamw", "sgd", "local"])  # torch copies no shards
def test_models_with_hooks_of_optimizers_are_copied_and_saved(rank, size, which):
    model = wrap(which, net())
    optimizer = coded(which, model)
    train(model, optimizer, rank, range(2))
    average, found = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), []
    for number in range(2, 4):
        train(model, optimizer, rank, range(number, number + 1))
        average.update_parameters(model)
        found.append(values(model))
    for one, *of in zip(values(average), *found, strict=True):
        torch.testing.assert_close(one, sum(of) / 2)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    for copied in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        assert equal(values(copied), values(model))
        copied(gradients(rank, 0)).backward()
        coded(which, copied)  # a copy has no hook, and takes one
    train(model, optimizer, rank, range(4, 6))
