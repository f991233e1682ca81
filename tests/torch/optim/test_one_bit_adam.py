"""OneBitAdam and ZeroOneAdam, against their formulas in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from tests.torch.harness import SHAPES, Chosen, equal, gradients, near, values
from tests.torch.optim.test_coded_adamw import train

SIZES = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
EPS = 1e-8
CALM = {"find_unused_parameters": True}
FIRST = 20  # of gradients with which round-off turns no sign of a coded value near zero
# Every value is coded, and residuals are kept as they are.
EVERYTHING = pycomm.Policy("sign", rules=(), guard=None)
CODED = {"codec": EVERYTHING, "feedback": "residual:storage=float32"}


def start() -> DistributedDataParallel:
    model = DistributedDataParallel(Chosen(), **CALM)
    with torch.no_grad():
        for i, parameter in enumerate(model.module.parameters()):
            parameter.add_(0.01 * (i + 1))
    return model


class TwoCodings:
    """1-bit all-reduce of the parameters of a model: both sides have a residual.

    A rank owns a range of all values, in the order of the model, cut at blocks of the codec. Each
    parameter is coded by itself, so the ranges do not change what is coded: blocks begin anew with
    each parameter.
    """

    def __init__(self, ranks: int) -> None:
        self.codec = pycomm.codec("sign")
        self.e: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.s: dict[str, torch.Tensor] = {}

    def code(self, p: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(self.codec.encode(p), p.numel())

    def mean(self, name: str, xs: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(xs[0].numel())
        for e, x in zip(self.e, xs, strict=True):
            p = x.reshape(-1) + e.get(name, 0)
            q = self.code(p)
            e[name] = p - q
            total += q
        back = total / len(xs) + self.s.get(name, 0)
        answer = self.code(back)
        self.s[name] = back - answer
        return answer.view_as(xs[0])


class OneBit:
    """Tang et al. 2021, algorithm 1, for a whole model on all ranks."""

    def __init__(self, model: DistributedDataParallel, ranks: int, warmup: int) -> None:
        self.x = {n: p.detach().clone() for n, p in model.module.named_parameters()}
        self.m = {n: torch.zeros_like(x) for n, x in self.x.items()}
        self.v = {n: torch.zeros_like(x) for n, x in self.x.items()}
        self.reduce, self.warmup, self.t = TwoCodings(ranks), warmup, 0

    def step(self, gs: list[dict[str, torch.Tensor]]) -> None:
        b1, b2 = SIZES["betas"]
        lr, wd = SIZES["lr"], SIZES["weight_decay"]
        self.t += 1
        for n in self.x:
            if self.t <= self.warmup:
                g = sum(one[n] for one in gs) / len(gs)
                self.m[n] = b1 * self.m[n] + (1 - b1) * g
                self.v[n] = b2 * self.v[n] + (1 - b2) * g * g
            else:
                ms = [b1 * self.m[n] + (1 - b1) * one[n] for one in gs]
                self.m[n] = self.reduce.mean(n, ms)
            d = (self.v[n] / (1 - b2 ** min(self.t, self.warmup))).sqrt() + EPS
            self.x[n] = self.x[n] * (1 - lr * wd) - lr * self.m[n] / (1 - b1**self.t) / d


def one_bit(rank: int, size: int) -> list[torch.Tensor]:
    model = start()
    optimizer = pycomm.OneBitAdam(model.parameters(), model=model, warmup=3, **SIZES, **CODED)
    plain = OneBit(model, size, 3)
    for step in range(FIRST, FIRST + 8):
        train(model, optimizer, rank, range(step, step + 1))
        plain.step([gradients(r, step) for r in range(size)])
    for name, parameter in model.module.named_parameters():
        # Round-off of float32 in another order, in units of the denominators, some of which are
        # small. A sign that is turned would be an error of a thousand times that.
        error = (parameter.detach() - plain.x[name]) * plain.v[name].sqrt()
        assert float(error.abs().max()) < 1e-6
    return values(model)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_of_one_bit_adam_is_that_of_the_formula(pool, ranks):
    if ranks == 1:  # one rank codes nothing, so that only the warm-up is compared
        pool.run(warms_up, ranks=1)
        return
    found = pool.run(one_bit, ranks=ranks)
    assert all(equal(one, found[0]) for one in found)


def warms_up(rank: int, size: int) -> None:
    a, b = start(), start()
    one = pycomm.OneBitAdam(a.parameters(), model=a, warmup=4, **SIZES)
    two = torch.optim.AdamW(b.parameters(), **SIZES)
    train(a, one, rank, range(4))
    train(b, two, rank, range(4))
    assert near(values(a), values(b))
    assert one.state[a.module.big].keys() == two.state[b.module.big].keys()


def test_the_warm_up_moves_as_torchs_adamw(pool):
    pool.run(warms_up)


# ---------------------------------------------------------------- 0/1 Adam


class ZeroOne:
    """Lu et al. 2022, algorithm 1, with sets of steps written down by hand."""

    def __init__(
        self, model: DistributedDataParallel, ranks: int, exact: set[int], together: set[int]
    ) -> None:
        self.exact, self.together, self.t = exact, together, 0
        start = {n: p.detach().clone() for n, p in model.module.named_parameters()}
        self.start = start
        self.x = [dict(start) for _ in range(ranks)]
        zeros = {n: torch.zeros_like(x) for n, x in start.items()}
        self.m, self.u = ([dict(zeros) for _ in range(ranks)] for _ in range(2))
        self.v, self.updates = dict(zeros), 0
        self.reduce, self.rates = TwoCodings(ranks), 0.0

    def step(self, gs: list[dict[str, torch.Tensor]]) -> None:
        b1, b2 = SIZES["betas"]
        ranks = range(len(gs))
        self.t += 1
        a = SIZES["lr"] / (1 - b1**self.t)
        if self.t in self.exact:
            self.updates += 1
        else:
            self.rates += a
        for n in self.start:
            if self.t in self.exact:
                g = sum(one[n] for one in gs) / len(gs)
                self.v[n] = b2 * self.v[n] + (1 - b2) * g * g
                gs = [{**one, n: g} for one in gs]
            d = (self.v[n] / (1 - b2**self.updates)).sqrt() + EPS
            for r in ranks:
                self.m[r][n] = b1 * self.m[r][n] + (1 - b1) * gs[r][n]
                self.u[r][n] = self.u[r][n] + a * self.m[r][n]
                self.x[r][n] = self.x[r][n] - a * self.m[r][n] / d
            if self.t in self.exact:
                self._meet(n, self.m[0][n], self.start[n] - a * self.m[0][n] / d)
            elif self.t in self.together:
                mean = self.reduce.mean(n, [self.u[r][n] for r in ranks])
                self._meet(n, mean / self.rates, self.start[n] - mean / d)
        if self.t in self.together:
            self.rates = 0.0

    def _meet(self, n: str, m: torch.Tensor, x: torch.Tensor) -> None:
        self.start[n] = x
        for r in range(len(self.x)):
            self.x[r][n], self.m[r][n], self.u[r][n] = x, m, torch.zeros_like(x)


def zero_one(rank: int, size: int) -> list[torch.Tensor]:
    model = start()
    given: dict[str, Any] = {**SIZES, **CODED, "weight_decay": 0.0, "model": model}
    given |= {"freeze": 7, "variance_steps": 2, "local_steps": 2, "most_local": 4}
    optimizer = pycomm.ZeroOneAdam(model.parameters(), **given)
    exact = {s for s in range(1, 40) if s <= 7 and optimizer._updates_variance(s)}
    together = {s for s in range(1, 20) if optimizer._synchronizes(s)}
    assert exact == {1, 2, 4, 6}
    assert together == {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 19}
    plain = ZeroOne(model, size, exact, together)
    found: list[torch.Tensor] = []
    for step in range(19):
        train(model, optimizer, rank, range(step, step + 1))
        plain.step([gradients(r, step) for r in range(size)])
        for name, parameter in model.module.named_parameters():
            error = (parameter.detach() - plain.x[rank][name]) * plain.v[name].sqrt()
            assert float(error.abs().max()) < 1e-6  # as above
        apart = step + 1 not in together
        assert optimizer.is_synchronized != apart
        if apart:
            with pytest.raises(Error, match="is_synchronized"):
                optimizer.state_dict()
        else:
            found += values(model)
    assert optimizer.steps == 19
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_of_zero_one_adam_is_that_of_the_formula(pool, ranks):
    found = pool.run(zero_one, ranks=ranks)
    assert all(equal(one, found[0]) for one in found)


def sends_nothing(rank: int, size: int) -> tuple[bool, bool]:
    model = start()
    given: dict[str, Any] = {**SIZES, "model": model, "freeze": 1, "local_steps": 1}
    optimizer = pycomm.ZeroOneAdam(model.parameters(), most_local=8, **given)
    exchanges = []
    exchange = optimizer._exchange
    optimizer._exchange = lambda sums: exchanges.append(optimizer.steps + 1) or exchange(sums)
    train(model, optimizer, rank, range(17))
    return exchanges == [2, 3, 9, 17], optimizer.is_synchronized


def test_local_steps_exchange_nothing(pool):
    assert pool.run(sends_nothing) == [(True, True)] * 2


def forgives(rank: int, size: int) -> list[torch.Tensor]:
    """A rank whose gradient overflows in a step of its own leaves that out, and no other does."""
    model = start()
    given: dict[str, Any] = {**SIZES, "model": model, "freeze": 1, "local_steps": 1}
    optimizer = pycomm.ZeroOneAdam(model.parameters(), most_local=4, **given)
    for step in range(9):
        optimizer.zero_grad()
        gs = gradients(rank, step)
        if rank == 1 and step in (5, 6):
            gs["big"][0, 0] = math.nan
        model(gs).backward()
        optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert optimizer.is_synchronized
    return values(model)


def test_an_overflow_in_a_local_step_stays_on_its_rank(pool):
    first, second = pool.run(forgives)
    assert equal(first, second)


def idle(rank: int, size: int) -> None:
    model = start()
    parts = [{"params": [model.module.big], "lr": 0.0}, {"params": [model.module.small]}]
    optimizer = pycomm.ZeroOneAdam(parts, model=model, freeze=1, **SIZES)
    before = dict(zip(SHAPES, values(model), strict=True))
    train(model, optimizer, rank, range(3))
    assert torch.equal(model.module.big, before["big"])
    assert not torch.equal(model.module.small, before["small"])
    assert torch.equal(model.module.bias, before["bias"])  # no optimizer has it


def test_groups_without_a_learning_rate_take_no_part(pool):
    pool.run(idle)
