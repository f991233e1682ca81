"""Discarded gradients: those that are reduced but never used leave nothing in the residuals.

A GAN's generator step makes gradients of the discriminator that the next `zero_grad` removes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.reduction.taken import _holds
from tests.extent import each_value, pairs
from tests.torch.harness import (
    CODED,
    SHAPES,
    Chosen,
    all_equal,
    equal,
    gradients,
    mean,
    near_zero,
    owed,
    residuals_of,
    whole,
)
from tests.torch.pool import on_ranks

STEPS = 12  # twice the period of what the loops below do
WRAPPERS = {
    "ddp": {},
    "ddp in one bucket": {"bucket_cap_mb": 25},
    "ddp with views": {"gradient_as_bucket_view": True},
    "ddp of a static graph": {"static_graph": True},
    "ddp with unused": {"find_unused_parameters": True},
    "fsdp2": None,
    "hsdp": None,
}


def wrapped(kind: str, spec: str = "int4", **options: Any) -> tuple[nn.Module, Any]:
    given = WRAPPERS[kind]
    if given is not None:
        model: nn.Module = DistributedDataParallel(Chosen(), **{"bucket_cap_mb": 0.02} | given)
    else:
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(Chosen(), mesh=mesh)
    return model, pycomm.compress(model, spec, **options)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def junk(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return gradients that are ten times larger, as those of another loss may be."""
    return {name: 10 * g for name, g in gradients(rank, 1000 + step).items()}


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "backend", "how"),
    [
        *((kind, "pycomm", "") for kind in WRAPPERS),
        *((kind, "gloo", "") for kind in ("ddp", "fsdp2")),
        # Optimizers that leave version counters alone.
        *(("ddp", "pycomm", how) for how in ("fused", "foreach")),
        ("fsdp2", "pycomm", "foreach"),
    ],
)
def test_the_order_of_the_gan_tutorial(rank, size, kind, how):
    """Results with and without the backward that is for another model have the same bits."""
    for none in (True, False):
        check_tutorial(kind, rank, none, {how: True} if how else {})


def check_tutorial(kind: str, rank: int, none: bool, how: dict[str, Any]) -> None:
    (model, state), (calm, calm_state) = wrapped(kind), wrapped(kind)
    optimizer, calm_optimizer = (torch.optim.SGD(m.parameters(), 0.1, **how) for m in (model, calm))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=none)
        calm_optimizer.zero_grad(set_to_none=none)
        model(gradients(rank, step)).backward()
        calm(gradients(rank, step)).backward()
        assert equal(grads(model), grads(calm)), step
        if step % 5 == 3:
            state.residual_norms()  # reading has no side effect
        optimizer.step()
        calm_optimizer.step()
        # A static graph rebuilds its buckets after its second backward, which changes the owners.
        begun = step > 2 or kind != "ddp of a static graph"
        for _ in range(1 + step % 2):
            if begun and step % 3 < 2:
                model(junk(rank, step)).backward()
            if step % 2:
                optimizer.zero_grad(set_to_none=none)
        other.step()
    calm_optimizer.zero_grad()
    assert equal(*(residuals_of(s.state_dict()) for s in (state, calm_state)))
    assert all(worker > 0 for worker, _ in state.residual_norms().values())


def sgd(model: nn.Module) -> Callable[[], None]:
    return torch.optim.SGD(model.parameters(), 0.1).step


def by_hand(model: nn.Module) -> Callable[[], None]:
    def step() -> None:
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    return step


@on_ranks(2)
@each_value
@pytest.mark.parametrize(
    ("kind", "update", "synced"),
    pairs(["ddp", "ddp with views", "fsdp2"], [sgd, by_hand], [False, True]),
)
def test_gradients_that_add_up_are_not_thrown_away(rank, size, kind, update, synced):
    """Gradients of two backwards add up and are then used: sent and residual values all count."""
    model, state = wrapped(kind)
    update = update(model)
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        for part in (0, 1):
            if kind == "fsdp2":
                model.set_requires_gradient_sync(synced or part == 1)
                model(gradients(rank, 2 * step + part)).backward()
            elif part == 0 and not synced:
                with model.no_sync():
                    model(gradients(rank, 2 * step)).backward()
            else:
                model(gradients(rank, 2 * step + part)).backward()
        update()
        for name, p in getattr(model, "module", model).named_parameters():
            both = (mean(size, 2 * step + part)[name] for part in (0, 1))
            missing[name] += sum(both) - whole(p.grad)
    model.zero_grad()
    debts = owed(state)
    assert all(debts[name].any() for name in CODED)
    near_zero(*(missing[name] - debts[name] for name in SHAPES), atol=1e-4)


DISCARDED = [("residual", "int4"), ("momentum", "topk:0.1")]


@on_ranks(2)
@each_value
@pytest.mark.parametrize(
    ("kind", "feedback", "spec"),
    [
        *((kind, *how) for kind in ("ddp", "fsdp2") for how in DISCARDED),
        ("ddp", "residual", "powersgd:2"),
    ],
)
def test_discard(rank, size, kind, feedback, spec):
    """If it is unknown which code moves the parameters, or when, the user can call discard()."""
    (model, state), (calm, _) = (wrapped(kind, spec, feedback=feedback) for _ in range(2))
    state.discard()  # nothing to discard yet
    for step in range(8):
        for m in (model, calm):
            m.zero_grad()
            m(gradients(rank, step)).backward()
        assert equal(grads(model), grads(calm)), step
        by_hand(model)()
        model.zero_grad()
        if step % 2:
            model(junk(rank, step)).backward()
            state.discard()
            by_hand(model)()  # moves the parameters in any way


# ---------------------------------------------------------------------------------- taken gradients
# Gradients that somebody takes are never believed to be thrown away, whatever shows of it.
#
# Each test compares all that has arrived, and all that is owed in the end, with all gradients.


SIDE = 64


def given(rank: int, step: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * number + rank)
    return torch.randn(SIDE, SIDE, generator=generator)


def all_ranks(total: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Experts(nn.Module):
    """Of its matrices the first few are used; the gradients of the others are zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(8))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        total = sum((e.weight * 0).sum() for e in self.experts)
        for expert, gradient in zip(self.experts, gradients, strict=False):
            total = total + (expert(torch.eye(SIDE)).t() * gradient).sum()
        return total


@on_ranks(2)
@each_value
@pytest.mark.parametrize("used", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_of_zeros_say_nothing_about_others(rank, size, kind, used):
    """Gradients add up over two backwards; most of them are zero."""
    module = Experts()
    model: Any = DistributedDataParallel(module) if kind == "ddp" else fully_shard(module)
    state = pycomm.compress(model, "int4")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    got, want = ([torch.zeros(SIDE, SIDE) for _ in range(used)] for _ in range(2))
    for step in range(6):
        optimizer.zero_grad()
        for part in (0, 1):
            parts = [given(rank, 2 * step + part, i) for i in range(used)]
            model(parts).backward()
            want = [total + part for total, part in zip(want, parts, strict=True)]
        for total, expert in zip(got, module.experts, strict=False):
            total += whole(expert.weight.grad)
        optimizer.step()
    optimizer.zero_grad()
    debts = owed(state, {f"experts.{i}.weight": (SIDE, SIDE) for i in range(used)}).values()
    for arrived, debt, total in zip(got, debts, want, strict=True):  # of values around 10
        near_zero(arrived + debt - all_ranks(total), atol=1e-4)


@on_ranks(2, then=all_equal)
@each_value
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("feedback", ["residual", "decay"])
def test_join_stands_in_for_a_rank_without_data(rank, size, feedback, unused):
    """Where a rank has no more data, nobody steps: the others take what it helps to reduce."""
    torch.manual_seed(0)
    module = nn.Linear(SIDE, SIDE, bias=False)
    model = DistributedDataParallel(module, find_unused_parameters=unused)
    state = pycomm.compress(model, "int4", feedback=feedback)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    got, want = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    for epoch in range(2):
        with Join([model]):
            for step in range(3 + 6 * (rank == 0)):
                gradient = given(rank, 20 * epoch + step)
                (model(torch.eye(SIDE)).t() * gradient).sum().backward()
                want += gradient
                got += module.weight.grad
                optimizer.step()
                optimizer.zero_grad()
    if feedback == "residual":
        dist.broadcast(got, 0)  # of the rank that took them all
        debt = owed(state, {"weight": (SIDE, SIDE)})["weight"]
        near_zero(got + debt - all_ranks(want), atol=1e-4)
    return module.weight.detach()


@on_ranks(2)
def test_parameters_that_loading_replaces(rank, size):
    """FSDP2 takes what `load_state_dict(assign=True)` has put in its parameters' places."""

    def train(replaces: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(SIDE, SIDE, bias=False))
        pycomm.compress(model, "int4")
        found = []
        for step in range(8):
            if step in (0, 3) and (replaces or step == 0):
                saved = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
                model.load_state_dict(saved, assign=True)
                optimizer = torch.optim.SGD(model.parameters(), 0.1 * 0.5**step)
            (model(torch.eye(SIDE)) * given(rank, step)).sum().backward()
            found.append(whole(model.weight.grad).clone())
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert equal(train(True), train(False))


def test_one_value_that_is_not_zero_is_found():
    gradient = torch.zeros(1000)
    assert not _holds(gradient)
    for place in range(1000):  # some of them are among those that are looked at first
        gradient[place] = 1
        assert _holds(gradient), place
        gradient[place] = 0
