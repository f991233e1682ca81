"""DistributedLion, against its formula in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.optim.votes import Votes
from tests.extent import each_value
from tests.torch.harness import SHAPES, Chosen, equal, gradients, values
from tests.torch.optim.test_coded_adamw import train

OPTIONS = {"lr": 2.0**-8, "betas": (0.75, 0.875), "weight_decay": 0.25}
CALM = {"find_unused_parameters": True}


def make(result: Any = "majority", **options: Any) -> tuple[nn.Module, pycomm.DistributedLion]:
    model = DistributedDataParallel(Chosen(), **CALM)
    with torch.no_grad():
        for i, parameter in enumerate(model.module.parameters()):
            parameter.add_(0.01 * (i + 1))
    given = {**OPTIONS, "result": result, **options}
    return model, pycomm.DistributedLion(model.parameters(), model=model, **given)


class Plain:
    """The algorithm for one parameter on all ranks, written down from its description."""

    def __init__(self, start: torch.Tensor, ranks: int, result: str) -> None:
        self.x, self.result = start.clone(), result
        self.m = [torch.zeros_like(start) for _ in range(ranks)]

    def step(self, gs: list[torch.Tensor]) -> None:
        b1, b2 = OPTIONS["betas"]
        lr, wd = OPTIONS["lr"], OPTIONS["weight_decay"]
        total = torch.zeros_like(self.x)
        for rank, g in enumerate(gs):
            total += torch.sign(b1 * self.m[rank] + (1 - b1) * g)
            self.m[rank] = b2 * self.m[rank] + (1 - b2) * g
        update = total.sign() if self.result == "majority" else total / len(gs)
        self.x = self.x * (1 - lr * wd) - lr * update


def against_the_formula(rank: int, size: int, result: str) -> list[torch.Tensor]:
    model, optimizer = make(result)
    starts = {n: p.detach() for n, p in model.module.named_parameters()}
    plain = {n: Plain(start, size, result) for n, start in starts.items()}
    for step in range(6):
        train(model, optimizer, rank, range(step, step + 1))
        for name, reference in plain.items():
            reference.step([gradients(r, step)[name] for r in range(size)])
    for name, reference in plain.items():
        here = getattr(model.module, name)
        # One rounding in each step. A vote that is counted otherwise is lr / size or more.
        torch.testing.assert_close(here, reference.x, rtol=1e-6, atol=1e-7)
    return values(model)


@each_value
@pytest.mark.parametrize("result", ["majority", "mean"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_step_is_that_of_the_formula(pool, ranks, result):
    found = pool.run(against_the_formula, result, ranks=ranks)
    assert all(equal(one, found[0]) for one in found)
    if ranks in (2, 3):  # votes are counted exactly, so that backends cannot differ
        others = pool.run(against_the_formula, result, ranks=ranks, backend="gloo")
        assert all(equal(one, found[0]) for one in others)


def undecided(rank: int, size: int) -> list[torch.Tensor]:
    model, optimizer = make("mean", weight_decay=0.0)
    before = values(model)
    for _ in range(4):
        optimizer.zero_grad()
        model({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
        optimizer.step()
    return [now - then for now, then in zip(values(model), before, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_without_a_gradient_stay_where_they_are(pool, ranks):
    """A bit has no zero; a rank that votes for +1 by default would move them for ever."""
    for moved in pool.run(undecided, ranks=ranks):
        # Votes for both signs in turns: steps of 1/256 there and back, exact but for a rounding.
        assert all(float(value.abs().max()) <= 1e-6 for value in moved)


def asked_both_ways(rank: int, size: int, result: str) -> list[list[torch.Tensor]]:
    """Train while all ranks get all votes, and while owners answer."""
    found = []
    for gathers in (True, False):
        model, optimizer = make(result)
        train(model, optimizer, rank, range(1))
        for bucket in optimizer.compression._buckets.values():
            bucket.single.gathers = gathers
        train(model, optimizer, rank, range(1, 4))
        found.append(values(model))
    return found


@pytest.mark.parametrize("result", ["majority", "mean"])
def test_results_do_not_depend_on_who_counts(pool, result):
    for ranks in (2, 3, 4):
        found = [way for ways in pool.run(asked_both_ways, result, ranks=ranks) for way in ways]
        assert all(equal(one, found[0]) for one in found)


def counted(rank: int, size: int) -> None:
    """Every possible mean of so many ranks survives the codec of an owner's answer."""
    votes = Votes(majority=False, process_group=dist.group.WORLD)
    for ranks in (2, 3, 7, 12, 13, 14, 20, 100, 252, 253, 254, 1000):
        votes.process_group = Stub(ranks)
        counts = torch.arange(-ranks, ranks + 1, 2, dtype=torch.float32)
        for block in (counts, counts.flip(0), counts[len(counts) // 2 :], counts[-2:]):
            codec = votes.answer
            exact = block / ranks
            means = codec.decode(codec.encode(exact), exact.numel())
            votes._count(means)
            assert torch.equal(means, exact), ranks
        votes._buckets.clear()


class Stub:
    """As much of a group as an answer depends on."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def test_means_are_counted_exactly_for_any_number_of_ranks(pool):
    pool.run(counted, ranks=1)
