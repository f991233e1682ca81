"""SharedMaskAdamW, against its formula in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.optim import shared_mask
from pycomm.optim.places import Places
from pycomm.reduction import payloads
from tests.torch.harness import SHAPES, Chosen, equal, gradients, near, values
from tests.torch.optim.plain_agreement import Agreement
from tests.torch.optim.test_coded_adamw import train

SIZES = {"lr": 2.0**-7, "betas": (0.9, 0.75), "weight_decay": 0.25}
DENSITY, WARMUP = 0.125, 2
MASKED = {name: shape for name, shape in SHAPES.items() if len(shape) > 1}


def make(**options: Any) -> tuple[nn.Module, pycomm.SharedMaskAdamW]:
    model = DistributedDataParallel(Chosen(), find_unused_parameters=True)
    with torch.no_grad():
        for i, parameter in enumerate(model.module.parameters()):
            parameter.add_(0.01 * (i + 1))
    given = {"warmup": WARMUP, "density": DENSITY, "values": "fp32", **SIZES, **options}
    return model, pycomm.SharedMaskAdamW(model.parameters(), model=model, **given)


class Plain:
    """The algorithm for all masked matrices on all ranks, written down from its description."""

    def __init__(self, starts: dict[str, torch.Tensor], ranks: int) -> None:
        self.x = {n: x.clone() for n, x in starts.items()}
        self.e = {n: [torch.zeros_like(x) for _ in range(ranks)] for n, x in starts.items()}
        self.row = {n: torch.zeros(len(x)) for n, x in starts.items()}
        self.column = {n: torch.zeros(x[0].numel()) for n, x in starts.items()}
        self.agreement = {n: Agreement(len(x), x[0].numel()) for n, x in starts.items()}
        self.t = self.coded = 0

    def step(self, gs: list[dict[str, torch.Tensor]]) -> None:
        beta2, ranks = SIZES["betas"][1], len(gs)
        self.t += 1
        chunk = 0
        for name in self.x:
            mine = [g[name].view(len(self.x[name]), -1) for g in gs]
            share = self.agreement[name].share(mine, beta2)
            row = sum(g.square().sum(1) for g in mine) / ranks
            column = sum(g.square().sum(0) for g in mine) / ranks
            self.row[name] = beta2 * self.row[name] + (1 - beta2) * share * row
            self.column[name] = beta2 * self.column[name] + (1 - beta2) * share * column
            full = torch.outer(self.row[name], self.column[name]) / self.row[name].sum()
            d = (full / (1 - beta2**self.t)).sqrt()
            if self.t <= WARMUP:
                q = sum(mine) / ranks / d
            else:
                p = [
                    (g / d).flatten() + e.flatten() for g, e in zip(mine, self.e[name], strict=True)
                ]
                mask = torch.zeros(p[0].numel(), dtype=torch.bool)
                count = math.ceil(len(mask) / 4096)
                size = math.ceil(len(mask) / count)
                for begin in range(0, len(mask), size):
                    # A chunk's last part may be short, and as many values are chosen there.
                    chooser = p[(chunk + self.coded) % ranks][begin : begin + size]
                    mask[begin + chooser.abs().topk(round(DENSITY * size)).indices] = True
                    chunk += 1
                q = sum(torch.where(mask, one, 0.0) for one in p) / ranks
                self.e[name] = [torch.where(mask, 0.0, one) for one in p]
            lr, decay = SIZES["lr"], SIZES["weight_decay"]
            self.x[name] = self.x[name] * (1 - lr * decay) - lr * q.view(self.x[name].shape)
        self.coded += self.t > WARMUP


def against_the_formula(rank: int, size: int) -> list[torch.Tensor]:
    model, optimizer = make()
    own = dict(model.module.named_parameters())
    plain = Plain({name: own[name].detach() for name in MASKED}, size)
    for step in range(6):
        train(model, optimizer, rank, range(step, step + 1))
        plain.step([gradients(r, step) for r in range(size)])
        for name, wanted in plain.x.items():
            # Round-off in another order. A value that the mask had or lacked by mistake would be
            # wrong by lr and more.
            torch.testing.assert_close(own[name].detach(), wanted, rtol=1e-5, atol=1e-5)
    for name, kept in plain.e.items():
        here = optimizer.compression.own[name]
        torch.testing.assert_close(here.flatten(), kept[rank].flatten(), rtol=1e-3, atol=1e-3)
    return values(model)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_is_that_of_the_formula(pool, ranks):
    found = pool.run(against_the_formula, ranks=ranks)
    assert all(equal(one, found[0]) for one in found)


def small_ones(rank: int, size: int) -> None:
    """Parameters without a mask move as with torch's AdamW."""
    (a, one), b = make(), DistributedDataParallel(Chosen(), find_unused_parameters=True)
    b.module.load_state_dict(a.module.state_dict())
    two = torch.optim.AdamW(b.parameters(), **SIZES)
    train(a, one, rank, range(4))
    train(b, two, rank, range(4))
    exact = [name for name in SHAPES if name not in MASKED]
    assert exact
    for name in exact:
        assert near([getattr(a.module, name)], [getattr(b.module, name)]), name


def test_parameters_without_a_mask_move_as_with_adamw(pool):
    pool.run(small_ones)


def sent_positions(rank: int, size: int) -> int:
    """Return the bytes of the positions that a rank contributes to a step."""
    model, optimizer = make()
    found: list[int] = []

    def all_gather(payload: torch.Tensor, *rest: Any, **options: Any) -> payloads.Payloads:
        found.append(payload.numel())
        return payloads.all_gather(payload, *rest, **options)

    shared_mask.all_gather, before = all_gather, shared_mask.all_gather
    try:
        train(model, optimizer, rank, range(WARMUP + 1))
    finally:
        shared_mask.all_gather = before
    return sum(found)


def test_positions_travel_once_whatever_the_number_of_ranks(pool):
    chosen = sum(Places(math.prod(shape), DENSITY).chosen for shape in MASKED.values())
    for ranks in (2, 3, 4):
        sent = pool.run(sent_positions, ranks=ranks)
        assert sum(sent) == 2 * chosen  # int16
        assert max(sent) < 2 * chosen


@pytest.mark.parametrize("numel", [1, 5, 2048, 4096, 4097, 50176])
def test_values_of_chunks_are_those_of_the_parameter(numel):
    places = Places(numel, 0.01)
    values = torch.randn(numel)
    rows = places.rows(values)
    assert torch.equal(places.values(rows), values)
    chosen = places.choose(rows).long()
    assert chosen.shape == (places.chunks, places.each)
    largest = rows.abs().gather(1, chosen).min(1).values
    others = rows.clone().scatter_(1, chosen, 0.0).abs().max(1).values
    assert bool((largest >= others).all())
