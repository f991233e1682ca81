"""Residuals of a reduce-scatter where the layout of its bucket changes between steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm

SHAPE = (64, 48)


class Model(nn.Module):
    """A model whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * rank + step))


def sums(rank: int, size: int, codec: str) -> None:
    """What was averaged in all steps, and what ranks still owe, is the sum of the gradients."""
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    state = pycomm.compress(model, codec, feedback="residual:storage=float32")
    wanted, found = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(8):
        model(gradient(rank, step)).backward()
        wanted += sum(gradient(r, step) for r in range(size)) / size
        found += model.weight.grad.full_tensor()
        model.zero_grad()
    state.settle()
    owed = state.residuals["weight"].current("worker")  # a row for each rank that owns a part
    dist.all_reduce(owed)
    assert float((wanted - found).abs().max()) > 0.5
    # Round-off of eight sums.
    torch.testing.assert_close(found + owed.view(SHAPE) / size, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", ["int2", "int2 3:int3 5:int2", "int2 3:topk:0.1 6:int2"])
def test_codecs_that_take_turns_lose_nothing(pool, codec):
    pool.run(sums, codec)
