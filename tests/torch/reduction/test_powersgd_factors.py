"""PowerSGD over real groups: exact where possible, equal on all ranks, and without loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm.feedback import Feedback, Residuals
from pycomm.policy import Parameter, Policy
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.powersgd import Exchange, Factor, Memory
from tests.extent import each_value
from tests.torch.harness import all_equal
from tests.torch.pool import on_ranks

SHAPES = [{"a": (64, 96), "bias": (50,), "b": (30, 8, 10)}, {"c": (128, 40), "small": (4, 4)}]


class Model:
    """Two buckets, and a hook's state for them."""

    def __init__(self, spec: str, group: dist.ProcessGroup) -> None:
        policy = Policy(spec)
        self.group, self.feedback = group, Residuals(Feedback(), group.size())
        self.memory, self.step = Memory(), 0
        self.buckets = []
        for shapes in SHAPES:
            parameters = [Parameter(n, s, torch.float32) for n, s in shapes.items()]
            decisions = [policy.decide(p) for p in parameters]
            numbers = range(len(decisions))
            self.buckets.append(Bucket(decisions, numbers, self.feedback, torch.device("cpu")))

    def average(self, gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
        self.step += 1
        values = [g.clone() for g in gradients]
        under_way = [
            Exchange(
                v,
                bucket.pieces,
                self.memory,
                self.group,
                seed=3,
                step=self.step,
            )
            for v, bucket in zip(values, self.buckets, strict=True)
        ]
        for exchange in under_way:
            exchange.turn()
        for exchange in under_way:
            exchange.finish()
        finite = all(exchange.finite for exchange in under_way)
        self.memory.commit(finite)
        if finite:
            self.feedback.commit(p.name for bucket in self.buckets for p in bucket.pieces)
        return values, finite

    def owed(self) -> list[torch.Tensor]:
        """Return the mean of the residuals over the ranks."""
        owed = [torch.zeros(bucket.numel) for bucket in self.buckets]
        for bucket, sums in zip(self.buckets, owed, strict=True):
            for p in bucket.pieces:
                if p.residual is not None:
                    worker = p.residual.current("worker")
                    sums[p.offset : p.offset + p.numel] = worker
            dist.all_reduce(sums, group=self.group)
        return [sums / self.group.size() for sums in owed]


def gradients(rank: int, step: int, rank_of_mean: int | None = None) -> list[torch.Tensor]:
    """Return a rank's gradients; `rank_of_mean` is the rank of their mean over two ranks."""
    made = []
    for i, shapes in enumerate(SHAPES):
        parts = []
        for j, shape in enumerate(shapes.values()):
            seed = torch.Generator().manual_seed(1000 * step + 10 * i + j)
            rows, columns = shape[0], math.prod(shape[1:])
            apart = torch.randn(rows, columns, generator=seed)
            if rank_of_mean is None or len(shape) < 2:
                for _ in range(rank):
                    apart = torch.randn(rows, columns, generator=seed)
                parts.append(apart.view(-1))
                continue
            left = torch.randn(rows, rank_of_mean, generator=seed)
            right = torch.randn(rank_of_mean, columns, generator=seed)
            parts.append((left @ right + (1 - 2 * rank) * apart).view(-1))
        made.append(torch.cat(parts))
    return made


def mean(step: int, size: int, **options: Any) -> list[torch.Tensor]:
    everybody = [gradients(rank, step, **options) for rank in range(size)]
    return [sum(parts) / size for parts in zip(*everybody, strict=True)]


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_mean_of_that_rank_is_exact(rank, size):
    model = Model("powersgd:rank=3", dist.group.WORLD)
    got, finite = model.average(gradients(rank, 0, rank_of_mean=3))
    assert finite
    for g, want in zip(got, mean(0, size, rank_of_mean=3), strict=True):
        # The factors of the mean are sums of up to 96 products in float32.
        torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_alternate_turns_reach_the_mean(rank, size):
    """A constant mean is exact once both factors have been updated from it."""
    model = Model("powersgd:rank=3,alternate=1", dist.group.WORLD)
    got = [torch.zeros_like(g) for g in gradients(rank, 0)]
    for step in range(1, 5):
        for total, g in zip(got, model.average(gradients(rank, 0, rank_of_mean=3))[0], strict=True):
            total += g
        owed = model.owed()
        for total, o, want in zip(got, owed, mean(0, size, rank_of_mean=3), strict=True):
            torch.testing.assert_close(total + o, step * want, rtol=1e-4, atol=1e-4)
    for o, want in zip(owed, mean(0, size, rank_of_mean=3), strict=True):
        assert o.norm() < 1e-4 * want.norm()  # rounding of four steps


@on_ranks(then=all_equal)
@each_value
@pytest.mark.parametrize("spec", ["powersgd:2", "powersgd:2,alternate=1", "powersgd:2,restart=1"])
@pytest.mark.parametrize(("backend", "ranks"), [("pycomm", 2), ("gloo", 2), ("gloo", 3)])
def test_feedback_loses_nothing_and_ranks_agree(rank, size, spec):
    model = Model(spec, dist.group.WORLD)
    steps = 6
    got = [torch.zeros_like(g) for g in gradients(rank, 0)]
    for step in range(steps):
        for total, g in zip(got, model.average(gradients(rank, step))[0], strict=True):
            total += g
    for i, (total, owed) in enumerate(zip(got, model.owed(), strict=True)):
        want = sum(mean(step, size)[i] for step in range(steps))
        assert owed.norm() > 0.1 * want.norm()
        # The tolerance is the round-off of a few dozen float32 operations on values around 3.
        torch.testing.assert_close(total + owed, want, rtol=0, atol=1e-4)
    exact = slice(64 * 96, 64 * 96 + 50)
    torch.testing.assert_close(got[0][exact], sum(mean(s, size)[0][exact] for s in range(steps)))
    return got


def check_warm_start(rank: int, size: int) -> tuple[float, float]:
    """Return the errors of the first and the fourth step on a constant mean."""
    errors = []
    for warm in (False, True):
        model = Model("powersgd:4", dist.group.WORLD)
        fresh = Model("powersgd:4", dist.group.WORLD)
        fresh.memory = model.memory
        if warm:
            for _ in range(3):
                model.feedback = Residuals(Feedback(), size)
                model.average(gradients(rank, 0))
        want = mean(0, size)
        got, _ = fresh.average(gradients(rank, 0))
        errors.append(sum(float((g - w).norm()) for g, w in zip(got, want, strict=True)))
    return errors[0], errors[1]


def test_power_iteration_goes_on_from_step_to_step(pool):
    for cold, warm in pool.run(check_warm_start):
        assert warm < 0.98 * cold


@on_ranks(2)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_factors_keep_their_scale(rank, size, scale):
    """The scale of Q is that of the gradients; times them it would leave the range of float32."""
    model = Model("powersgd:rank=3", dist.group.WORLD)
    want = [scale * values for values in mean(0, size, rank_of_mean=3)]
    for _ in range(3):
        model.feedback = Residuals(Feedback(), size)
        got, finite = model.average([scale * g for g in gradients(rank, 0, rank_of_mean=3)])
        assert finite
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g / scale, w / scale, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_an_exact_piece_sends_its_residual_once(rank, size):
    residuals, memory = Residuals(Feedback(storage="float32"), size), Memory()
    decision = Policy("fp32").decide(Parameter("a", (4,), torch.float32))
    residual = residuals.get("a", 4, torch.device("cpu"))
    piece = Bucket([decision], [0], residuals, torch.device("cpu")).pieces[0]
    assert piece.residual is residual
    residual.worker[residual.side].fill_(2.0)
    residual.worker[1 - residual.side].fill_(5.0)  # of the step before
    for want in (3.0, 1.0):
        values = torch.ones(4)
        exchange = Exchange(values, [piece], memory, dist.group.WORLD, seed=3, step=1)
        exchange.turn()
        exchange.finish()
        residuals.commit(["a"])
        assert values.tolist() == [want] * 4


def test_saved_factors_continue():
    memory = Memory()
    memory.put("a", Factor(torch.ones(2, 5), False))
    memory.commit(True)
    other = Memory()
    other.load_state_dict(memory.state_dict())
    found = other.factor("a", (7, 2), (2, 5))
    assert found is not None
    assert torch.equal(found.values, torch.ones(2, 5))
    assert other.factor("a", (7, 3), (3, 5)) is None  # the rank has changed, so the factor is reset
