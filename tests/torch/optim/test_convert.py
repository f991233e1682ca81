"""code_optimizer replaces an optimizer that others hold: schedulers, trainers, gradient scalers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import pycomm
from pycomm.errors import Error
from pycomm.optim.convert import code_in_place
from tests.torch.hooks.test_ddp_compress import equal
from tests.torch.optim.test_owned_parameters import batch, net, train, values
from tests.torch.pool import on_ranks

OLD = {
    "adamw": lambda params: torch.optim.AdamW(params, 1.0),
    "sgd": lambda params: torch.optim.SGD(params, 1.0, momentum=0.9),
}
every = pytest.mark.parametrize("which", OLD)


@on_ranks(2)
@every
def test_a_scheduler_that_was_made_before_sets_the_rates(rank, size, which):
    model = DistributedDataParallel(net())
    old = OLD[which](model.parameters())
    scheduler = lr_scheduler.LambdaLR(old, lambda step: 0.1**step)
    new = pycomm.code_optimizer(old, model, "sign")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train(model, [new], rank, range(step, step + 1))
            scheduler.step()
    assert new.param_groups[0]["lr"] == pytest.approx(1e-3)
    saved = copy.deepcopy(new.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    new.load_state_dict(saved)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.5
    scheduler.step()
    assert new.param_groups[0]["lr"] != 0.5
    assert old.param_groups is new.param_groups


@on_ranks(2)
@every
def test_schedulers_of_before_and_after_do_the_same(rank, size, which):
    """Schedulers of momentum find the setting, and all ends where new ones bring it."""
    found = []
    for before in (True, False):
        model = DistributedDataParallel(net())
        optimizer: Any = OLD[which](model.parameters())
        new = None if before else pycomm.code_optimizer(optimizer, model, "sign")
        scheduler = lr_scheduler.OneCycleLR(new or optimizer, max_lr=0.01, total_steps=8)
        new = new or pycomm.code_optimizer(optimizer, model, "sign")
        for step in range(5):
            train(model, [new], rank, range(step, step + 1))
            scheduler.step()
        found.append(values(model))
    assert equal(*found)


def used_on(rank: int, size: int, which: str) -> list[str]:
    model = DistributedDataParallel(net())
    old = OLD[which](model.parameters())
    if which == "adamw":
        lr_scheduler.LambdaLR(old, lambda _: 1.0)  # which wraps `step`
    saved = old.state_dict()
    pycomm.code_optimizer(old, model, "sign")
    before = values(model)
    (model(batch(rank, 0))).square().mean().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    texts = []
    for use in (
        old.step,
        lambda: scaler.step(old),
        old.state_dict,
        lambda: old.load_state_dict(saved),
        lambda: old.add_param_group({"params": []}),
        lambda: pycomm.code_optimizer(old, DistributedDataParallel(model.module)),
    ):
        try:
            use()
        except Error as error:
            texts.append(str(error))
    assert equal(values(model), before)
    return texts


@every
def test_the_old_optimizer_raises_and_says_what_helps(pool, which):
    for texts in pool.run(used_on, which):
        *used, again = texts
        assert len(used) == 5
        assert all("optimizer = pycomm.code_optimizer(optimizer, model" in text for text in used)
        assert "replaced before" in again


@on_ranks(2)
@every
def test_the_way_back_takes_its_own_options(rank, size, which):
    """Settings that torch's optimizer has left in the groups are not those of another one."""
    model = DistributedDataParallel(net())
    old = OLD[which](model.parameters())
    new: Any = pycomm.code_optimizer(old, model, "sign")
    back = (new.to_adamw if which == "adamw" else new.to_sgd)(fused=True)
    assert back.param_groups[0]["fused"]
    assert back.param_groups[0]["lr"] == 1.0
    refused = torch.optim.SGD(model.parameters(), 1.0)  # without momentum
    try:
        pycomm.code_optimizer(refused, model)
    except ValueError:
        refused.step()  # it stays what it was


@on_ranks(2)
@every
def test_a_rate_that_is_a_tensor_acts_like_a_number(rank, size, which):
    found = []
    for rate in (1 / 128, torch.tensor(1 / 128)):  # one number in both
        model = DistributedDataParallel(net())
        optimizer: Any = OLD[which](model.parameters())
        optimizer.param_groups[0]["lr"] = rate
        new = pycomm.code_optimizer(optimizer, model, "sign")
        train(model, [new], rank, range(2))
        new.param_groups[0]["lr"] *= 0.5  # in place, as torch's schedulers do
        train(model, [new], rank, range(2, 4))
        found.append(values(model))
    assert equal(*found)


@on_ranks(2)
def test_adam_without_weight_decay_is_coded_as_adamw(rank, size):
    found = []
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        model = DistributedDataParallel(net())
        old = kind(model.parameters(), 0.01, weight_decay=0.0)
        train(model, [pycomm.code_optimizer(old, model, "sign")], rank, range(4))
        found.append(values(model))
    assert equal(*found)


@on_ranks(2)
@every
def test_groups_that_are_added_have_the_old_settings(rank, size, which):
    model = DistributedDataParallel(net())
    *most, last = model.parameters()
    new: Any = pycomm.code_optimizer(OLD[which](most), model, "sign")
    new.add_param_group({"params": [last]})
    first, added = ({k: v for k, v in g.items() if k != "params"} for g in new.param_groups)
    assert added == {key: first[key] for key in added}


@on_ranks(2)
@every
def test_an_optimizer_that_becomes_coded_does_the_same(rank, size, which):
    """In the middle of training, with a scheduler that was made for it, and its hooks."""
    found = []
    for in_place in (True, False):
        model = DistributedDataParallel(net())
        optimizer: Any = OLD[which](model.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step + 1))
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        train(model, [optimizer], rank, range(2))
        model = DistributedDataParallel(model.module)
        if in_place:
            code_in_place(optimizer, model, "sign")
            assert isinstance(optimizer, (pycomm.CodedAdamW, pycomm.CodedSGD))
        else:
            optimizer = pycomm.code_optimizer(optimizer, model, "sign")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2, 5):
                train(model, [optimizer], rank, range(step, step + 1))
                scheduler.step()
        found.append(values(model))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        assert len(steps) == (5 if in_place else 2)
    assert equal(*found)


@on_ranks(2)
@every
def test_an_optimizer_that_cannot_become_coded_stays(rank, size, which):
    found = []
    for tried in (True, False):
        model = DistributedDataParallel(net())
        optimizer = OLD[which](model.parameters())
        if tried:
            with pytest.raises(ValueError, match="scale=mmse"):
                code_in_place(optimizer, model, "eden:bits=1")
        train(model, [optimizer], rank, range(2))
        found.append(values(model))
    assert equal(*found)


@on_ranks(2)
def test_a_coded_state_survives_torchs_adamw(rank, size):
    """As a script loads it that runs under `pycomm.run`: torch gives states the model's dtype."""
    model = DistributedDataParallel(net().bfloat16())
    old = OLD["adamw"](model.parameters())
    new: Any = pycomm.code_optimizer(old, model, "sign")
    model(batch(rank, 0).bfloat16()).square().mean().backward()
    new.step()
    loaded = DistributedDataParallel(model.module)
    other = OLD["adamw"](loaded.parameters())
    other.load_state_dict(copy.deepcopy(new.state_dict()))
    again: Any = pycomm.code_optimizer(other, loaded, "sign")
    state, before = (one.state[model.module[0].weight] for one in (again, new))
    assert state.keys() == before.keys()
    for key, value in state.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key].bfloat16().to(value.dtype))
