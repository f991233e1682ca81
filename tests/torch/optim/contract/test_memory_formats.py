"""Parameters whose order in memory is not that of their indices, as those of channels_last models:
every optimizer ends where it ends with contiguous ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.torch.harness import Chosen, equal, gradients
from tests.torch.optim import table
from tests.torch.pool import on_ranks

SHAPES = {"filters": (64, 8, 3, 3), "turned": (96, 40), "bias": (7,)}


def net(*, strided: bool) -> Chosen:
    model = Chosen(SHAPES, 0.1)
    if strided:
        filters, turned = model.filters.data, model.turned.data
        model.filters = nn.Parameter(filters.to(memory_format=torch.channels_last))
        model.turned = nn.Parameter(turned.t().contiguous().t())
    return model


CODECS = {"AdamW, sign": "sign", "AdamW, topk": "topk:0.05", "AdamW, exact": "fp32", "SGD": "sign"}


def coded(name: str, model: Any) -> Any:
    # Squares between two exchanges are not a part of a checkpoint.
    kind = "sgd" if name == "SGD" else "adamw"
    return table.coded(kind, model, codec=CODECS[name], refresh=1)


def advance(rank: int, model: Any, optimizer: Any, steps: range, parts: int = 1) -> None:
    for step in steps:
        given = (gradients(rank, parts * step + part, shapes=SHAPES) for part in range(parts))
        table.step(model, optimizer, *given)


def train(
    rank: int, name: str, *, strided: bool, parts: int = 1, views: bool = False
) -> tuple[list[torch.Tensor], Any, Any]:
    """Return the parameters, the optimizer and its model after six steps of so many backwards."""
    model = DistributedDataParallel(net(strided=strided), gradient_as_bucket_view=views)
    assert all(p.is_contiguous() for p in model.parameters()) != strided
    optimizer = coded(name, model)
    advance(rank, model, optimizer, range(6), parts)
    return contiguous(model), optimizer, model


def contiguous(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in model.parameters()]


def alike(rank: int, size: int, name: str, options: dict[str, Any]) -> list[torch.Tensor]:
    there, _, model = train(rank, name, strided=True, **options)
    want, _, _ = train(rank, name, strided=False, **options)
    # What is exact steps by torch where it is strided, whose roots can have another last bit.
    rtol, atol = (0.0, 0.0) if name == "SGD" else (1e-5, 1e-6)
    torch.testing.assert_close(there, want, rtol=rtol, atol=atol)
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
    return there


@pytest.mark.parametrize("name", CODECS)
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
        other = DistributedDataParallel(net(strided=not strided))
        two: Any = coded("AdamW, sign", other)
        other.load_state_dict(saved[0])
        two.load_state_dict(saved[1])
        two.compression.load_state_dict(saved[2])
        for m, optimizer in ((model, one), (other, two)):
            advance(rank, m, optimizer, range(6, 9))
        torch.testing.assert_close(contiguous(model), contiguous(other), rtol=1e-5, atol=1e-6)
        assert other.module.filters.is_contiguous() == strided
