"""Parameters whose order in memory is not that of their indices, as those of channels_last models:
every optimizer ends where it ends with contiguous ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.harness import all_equal, equal, near
from tests.torch.pool import on_ranks

SHAPES = {"filters": (64, 8, 3, 3), "turned": (96, 40), "bias": (7,)}


class Model(nn.Module):
    """A model whose gradients are given."""

    def __init__(self, *, strided: bool) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 0.1
            if strided and name == "filters":
                value = value.to(memory_format=torch.channels_last)
            if strided and name == "turned":
                value = value.t().contiguous().t()
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())


Make = Callable[[DistributedDataParallel], torch.optim.Optimizer]


def coded_adamw(codec: str) -> Make:
    # Squares between two exchanges are not a part of a checkpoint.
    return lambda model: pycomm.CodedAdamW(
        model.parameters(), 1e-2, model=model, codec=codec, refresh=1
    )


OPTIMIZERS: dict[str, Make] = {
    "AdamW, sign": coded_adamw("sign"),
    "AdamW, topk": coded_adamw("topk:0.05"),
    "AdamW, exact": coded_adamw("fp32"),
    "SGD": lambda model: pycomm.CodedSGD(
        model.parameters(), 1e-2, momentum=0.9, model=model, codec="sign"
    ),
}


def train(
    rank: int, name: str, *, strided: bool, parts: int = 1, views: bool = False
) -> tuple[list[torch.Tensor], Any, Any]:
    """Return the parameters, the optimizer and its model after six steps of so many backwards."""
    model = DistributedDataParallel(Model(strided=strided), gradient_as_bucket_view=views)
    assert all(p.is_contiguous() for p in model.parameters()) != strided
    optimizer = OPTIMIZERS[name](model)
    advance(rank, model, optimizer, range(6), parts)
    return values(model), optimizer, model


def advance(rank: int, model: Any, optimizer: Any, steps: range, parts: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            model(rank, parts * step + part).backward()
        optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in model.parameters()]


def alike(rank: int, size: int, name: str, options: dict[str, Any]) -> list[torch.Tensor]:
    there, _, model = train(rank, name, strided=True, **options)
    want, _, _ = train(rank, name, strided=False, **options)
    # What is exact steps by torch where it is strided, whose roots can have another last bit.
    assert (equal if name == "SGD" else near)(there, want)
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
    return there


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_formats_change_no_result(pool, name):
    found = pool.run(alike, name, {})
    assert equal(*found)


@pytest.mark.parametrize("options", [{"parts": 2}, {"views": True}])
def test_backwards_that_add_up_and_gradients_in_buckets(pool, options):
    found = pool.run(alike, "AdamW, sign", options)
    assert equal(*found)


@on_ranks(2)
def test_checkpoints_move_between_formats(rank, size):
    """A checkpoint of a channels_last model is that of a contiguous one, and the reverse."""
    for strided in (True, False):
        _, one, model = train(rank, "AdamW, sign", strided=strided)
        saved = copy.deepcopy((model.state_dict(), one.state_dict(), one.compression.state_dict()))
        other = DistributedDataParallel(Model(strided=not strided))
        two: Any = OPTIMIZERS["AdamW, sign"](other)
        other.load_state_dict(saved[0])
        two.load_state_dict(saved[1])
        two.compression.load_state_dict(saved[2])
        for m, optimizer in ((model, one), (other, two)):
            advance(rank, m, optimizer, range(6, 9))
        assert near(values(model), values(other))
        assert other.module.filters.is_contiguous() == strided


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_compressed_gradients_are_those_of_contiguous_ones(rank, size, codec):
    """What is coded in the order of memory has other blocks, and the same sums."""
    models = [DistributedDataParallel(Model(strided=strided)) for strided in (True, False)]
    for model in models:
        pycomm.compress(model, codec)
        advance(rank, model, torch.optim.SGD(model.parameters(), 0.1), range(3))
    strided, plain = map(values, models)
    for one, other in zip(strided, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if codec == "fp32" else 0.02)
    return strided
