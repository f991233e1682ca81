"""Parameters that get no gradients cost nothing: no budget, no memory, no checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm

SIDE = 128


def layers(trained: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)])
    for i, layer in enumerate(model):
        layer.weight.requires_grad_(i == trained)
    return model


def steps(model: nn.Module, rank: int, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(count):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, SIDE, generator=generator)).square().mean().backward()
        optimizer.step()


def check_frozen(rank: int, size: int, kind: str) -> None:
    model: Any = layers(trained=3)
    if kind == "ignored":
        for layer in model:
            layer.weight.requires_grad_(True)
        names = [f"{i}.weight" for i in range(3)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    model = fully_shard(model) if kind == "fsdp2" else DistributedDataParallel(model)
    integers = tuple(f"int{bits}" for bits in range(2, 9))  # which have residuals
    state = pycomm.compress(model, pycomm.Policy(budget=4.3, candidates=integers))
    steps(model, rank, 4)
    report = state.plan.report()
    assert report.plain_bytes == 4 * SIDE**2
    assert report.payload_bytes <= 4.3 * SIDE**2 / 8
    rows = size if kind == "fsdp2" else 1
    worker = 2 * 4 * SIDE**2
    assert state.residual_bytes == worker + (worker // size if rows == 1 else 0)
    if kind == "fsdp2":  # unfrozen at any time
        model[1].weight.requires_grad_(True)
        steps(model, rank, 2)
        assert state.decisions.keys() == {"1.weight", "3.weight"}
        assert state.residual_norms()["1.weight"][0] > 0


@pytest.mark.parametrize("kind", ["ddp", "ignored", "fsdp2"])
def test_frozen_parameters_take_no_bits(pool, kind):
    pool.run(check_frozen, kind)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ignored, self.first, self.second = (
            nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.first(x) if step % 2 else self.second(x)


def check_unused(rank: int, size: int) -> None:
    """What an unused parameter owes stays owed, also where DDP ignores others."""
    model = Half()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored.weight"])
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    state = pycomm.compress(wrapped, "int4")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {}
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank)
        wrapped(torch.randn(8, SIDE, generator=generator), step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        unused = "second.weight" if step % 2 else "first.weight"
        norms = state.residual_norms()
        if unused in before:
            assert norms[unused] == before[unused]
            assert norms[unused][0] > 0
        before = norms


def test_unused_parameters_beside_ignored_ones(pool):
    pool.run(check_unused)


def check_frozen_between(rank: int, size: int) -> None:
    """Frozen behind DDP's back, before compression: its buckets hold it all the same."""
    model = layers(trained=3)
    model[2].weight.requires_grad_(True)
    wrapped = DistributedDataParallel(model)
    model[2].weight.requires_grad_(False)
    state = pycomm.compress(wrapped, "int8")
    model[2].weight.requires_grad_(True)
    steps(wrapped, rank, 3)
    assert state.decisions.keys() == {"2.weight", "3.weight"}
    assert state.residual_norms()["2.weight"][0] > 0


def test_frozen_between_wrapping_and_compressing(pool):
    pool.run(check_frozen_between)
