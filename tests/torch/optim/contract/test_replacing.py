"""An optimizer that becomes coded, which others hold: schedulers, trainers, gradient scalers."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import pycomm
from pycomm.errors import Error
from tests.torch.harness import equal, values
from tests.torch.optim.table import (
    SHAPES,
    coded,
    gradients,
    in_ddp,
    net,
    plain,
    rows,
    train,
    wrap,
)
from tests.torch.pool import on_ranks


@on_ranks()
@rows()
def test_a_scheduler_that_was_made_before_sets_the_rates(rank, size, which):
    model = wrap(which, net())
    old = plain(which, model.parameters(), lr=1.0)
    scheduler = lr_scheduler.LambdaLR(old, lambda step: 0.1**step)
    new = pycomm.code_optimizer(old, model, "sign")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            train(model, new, rank, range(number, number + 1))
            scheduler.step()
    assert new.param_groups[0]["lr"] == pytest.approx(1e-3)
    saved = copy.deepcopy(new.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    new.load_state_dict(saved)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.5
    scheduler.step()
    assert new.param_groups[0]["lr"] != 0.5
    assert old.param_groups is new.param_groups


@on_ranks()
@rows()
def test_schedulers_of_before_and_after_do_the_same(rank, size, which):
    """Schedulers of momentum find the setting, and all ends where new ones bring it."""
    found = []
    for before in (True, False):
        model = wrap(which, net())
        optimizer: Any = plain(which, model.parameters())
        new = None if before else pycomm.code_optimizer(optimizer, model, "sign")
        scheduler = lr_scheduler.OneCycleLR(new or optimizer, max_lr=0.01, total_steps=8)
        new = new or pycomm.code_optimizer(optimizer, model, "sign")
        for number in range(5):
            train(model, new, rank, range(number, number + 1))
            scheduler.step()
        found.append(values(model))
    assert equal(*found)


@on_ranks(2)
@in_ddp
def test_settings_of_groups_and_a_schedule(rank, size, which):
    model = wrap(which, net(unit=0.0))
    with torch.no_grad():
        model.module.big.fill_(1.0)
    parts = [
        {"params": [model.module.big], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model.module.small], "lr": 0.25, "weight_decay": 0.0},
        {"params": [model.module.bias]},
    ]
    optimizer = coded(which, model, parts)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    train(model, optimizer, rank, range(1))
    scheduler.step()
    assert torch.equal(model.module.big, torch.ones(SHAPES["big"]))
    assert float(model.module.small.abs().max()) > 0.1
    assert optimizer.param_groups[1]["lr"] == 0.125


@on_ranks()
@rows()
def test_the_old_optimizer_raises_and_says_what_helps(rank, size, which):
    model = wrap(which, net())
    old = plain(which, model.parameters())
    lr_scheduler.LambdaLR(old, lambda _: 1.0)  # which wraps `step`
    saved = old.state_dict()
    pycomm.code_optimizer(old, model, "sign")
    before = values(model)
    model(gradients(rank, 0)).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for use in (
        old.step,
        lambda: scaler.step(old),
        old.state_dict,
        lambda: old.load_state_dict(saved),
        lambda: old.add_param_group({"params": []}),
        lambda: copy.deepcopy(old),
        lambda: copy.copy(old),
        lambda: pickle.dumps(old),
    ):
        with pytest.raises(Error, match=r"optimizer = pycomm\.code_optimizer\(optimizer, model"):
            use()
    with pytest.raises(Error, match="replaced before"):
        pycomm.code_optimizer(old, wrap(which, net()))
    assert equal(values(model), before)


@on_ranks()
@rows()
def test_the_way_back_takes_its_own_options(rank, size, which):
    """Settings that torch's optimizer has left in the groups are not those of another one."""
    model = wrap(which, net())
    new: Any = pycomm.code_optimizer(plain(which, model.parameters(), lr=1.0), model, "sign")
    back = (new.to_sgd if which.startswith("sgd") else new.to_adamw)(fused=True)
    assert back.param_groups[0]["fused"]
    assert back.param_groups[0]["lr"] == 1.0
    refused = torch.optim.SGD(model.parameters(), 1.0)  # without momentum
    with pytest.raises(ValueError, match="no momentum"):
        pycomm.code_optimizer(refused, model)
    refused.step()  # it stays what it was


@on_ranks()
@rows()
def test_a_rate_that_is_a_tensor_acts_like_a_number(rank, size, which):
    found = []
    for rate in (1 / 128, torch.tensor(1 / 128)):  # one number in both
        model = wrap(which, net())
        new = pycomm.code_optimizer(plain(which, model.parameters(), lr=rate), model, "sign")
        train(model, new, rank, range(2))
        new.param_groups[0]["lr"] *= 0.5  # in place, as torch's schedulers do
        train(model, new, rank, range(2, 4))
        found.append(values(model))
    assert equal(*found)


@on_ranks()
@rows(of="adamw")
def test_adam_without_weight_decay_is_coded_as_adamw(rank, size, which):
    found = []
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        model = wrap(which, net())
        old = kind(model.parameters(), 0.01, weight_decay=0.0)
        train(model, pycomm.code_optimizer(old, model, "sign"), rank, range(4))
        found.append(values(model))
    assert equal(*found)


@on_ranks()
@rows()
def test_groups_that_are_added_have_the_old_settings(rank, size, which):
    model = wrap(which, net())
    *most, last = model.parameters()
    new: Any = pycomm.code_optimizer(plain(which, most), model, "sign")
    new.add_param_group({"params": [last]})
    first, added = ({k: v for k, v in g.items() if k != "params"} for g in new.param_groups)
    assert added == {key: first[key] for key in added}
