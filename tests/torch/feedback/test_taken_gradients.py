"""Gradients that somebody takes are never believed to be thrown away, whatever shows of it.

Each test compares all that has arrived, and all that is owed in the end, with all gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.reduction.taken import _holds
from tests.extent import each_value
from tests.torch.feedback.test_thrown_gradients import owed, own
from tests.torch.harness import all_equal
from tests.torch.pool import on_ranks

SIDE = 64


def given(rank: int, step: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * number + rank)
    return torch.randn(SIDE, SIDE, generator=generator)


def all_ranks(total: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total)
    return total / dist.get_world_size()


def still_owed(state: Any, name: str) -> torch.Tensor:
    """What all ranks owe to the average."""
    residual = owed(state)[name]
    owner = residual.get("owner", torch.zeros(1))
    return all_ranks(residual["worker"].clone()) + all_ranks(owner * dist.get_world_size())


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
            gradient = expert.weight.grad
            total += gradient if kind == "ddp" else gradient.full_tensor()
        optimizer.step()
    optimizer.zero_grad()
    for i in range(used):
        still = still_owed(state, f"experts.{i}.weight").view(SIDE, SIDE)
        # Round-off of some dozens of float32 additions of values around 10.
        torch.testing.assert_close(got[i] + still, all_ranks(want[i]), rtol=0, atol=1e-4)


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
        still = still_owed(state, "weight").view(SIDE, SIDE)
        torch.testing.assert_close(got + still, all_ranks(want), rtol=0, atol=1e-4)
    return module.weight.detach()


@on_ranks(2)
def test_parameters_that_loading_replaces(rank, size):
    """FSDP2 takes what `load_state_dict(assign=True)` has put in its parameters' places."""

    def train(replaces: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(SIDE, SIDE, bias=False))
        state = pycomm.compress(model, "int4")
        found = []
        for step in range(8):
            if step in (0, 3) and (replaces or step == 0):
                saved = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
                model.load_state_dict(saved, assign=True)
                optimizer = torch.optim.SGD(model.parameters(), 0.1 * 0.5**step)
                state.follow(optimizer=optimizer)
            (model(torch.eye(SIDE)) * given(rank, step)).sum().backward()
            found.append(own(model.weight.grad).clone())
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert all(map(torch.equal, train(True), train(False)))


def test_one_value_that_is_not_zero_is_found():
    gradient = torch.zeros(1000)
    assert not _holds(gradient)
    for place in range(1000):  # some of them are among those that are looked at first
        gradient[place] = 1
        assert _holds(gradient), place
        gradient[place] = 0
