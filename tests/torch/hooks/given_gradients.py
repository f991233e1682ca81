"""A model whose gradients are those that a test gives it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm

SHAPES = ((61, 37), (33,), (64, 41))  # of odd sizes; two buckets: the first, and the others


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def drawn(rank: int, step: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def mean(step: int, ranks: int) -> list[torch.Tensor]:
    every = [drawn(rank, step) for rank in range(ranks)]
    return [sum(parts[1:], parts[0]) / ranks for parts in zip(*every, strict=True)]


def lost_in_all(
    backward: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    state: pycomm.CompressionState,
    rank: int,
    ranks: int,
) -> list[torch.Tensor]:
    """Return what two steps, and the exact one that follows, lack of the means, in sum."""
    total = [torch.zeros(shape) for shape in SHAPES]
    for step in range(3):
        if step == 2:
            state.set_policy("none")
        found = backward(drawn(rank, step))
        for sum_, want, part in zip(total, mean(step, ranks), found, strict=True):
            sum_ += want - part
    return total


def by_torch(rank: int, codec: str, steps: int) -> list[list[torch.Tensor]]:
    """Return what torch's DDP makes of the same gradients."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=1e-6)  # a bucket for each parameter
    model(drawn(rank, 0)).backward()  # in its first step DDP has one bucket
    pycomm.compress(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(drawn(rank, step)).backward()
        optimizer.step()  # else the gradients count as thrown away
        found.append([weight.grad.clone() for weight in model.module.weights])
    return found
