"""LocalSGD where one rank has a gradient that is not finite, or takes fewer steps than others."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import pycomm
from pycomm.local_sgd import Blocking, Quorum, Streamed
from tests.torch.harness import alike, batch, check_sum, heard, network, values
from tests.torch.pool import on_ranks

FORMS = {
    "blocking": {"exchange": Blocking()},
    "fragments": {"exchange": Streamed(2, overlap=0)},
    "overlapped fragments": {"exchange": Streamed(2, overlap=1)},
    "a round later": {"exchange": Streamed(overlap=4)},
    "on a thread": {"exchange": Streamed(2, overlap=2), "weighted": True},
    "quorum": {"exchange": Quorum(2)},
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
    """A GradScaler skips steps of rank 1, which the context manager does not count."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pycomm.LocalSGD(model, every=4, codec="int8", optimizer=optimizer, **FORMS[form]) as local:
        for step in range(9):
            x, y = batch(rank, step)
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * float("inf" if rank == 1 and step in overflows else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
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
