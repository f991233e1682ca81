"""A run that wraps, compresses, loads and trains goes on with the bits of the saved run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.hooks.saved_buckets import SavedBuckets
from tests.torch.harness import equal, values
from tests.torch.pool import on_ranks

KINDS = ["residual", "decay:0.8", "momentum:0.9"]
STORAGES = ["float32", "bf16", "int8"]
FEEDBACKS = [f"{k}{',' if ':' in k else ':'}storage={s}" for k in KINDS for s in STORAGES]
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}
SHARDS = {"fsdp2": (1, 4), "hsdp": (2, 2)}
WIDTH, SAVED, END = 64, 3, 6


class Net(nn.Module):
    """Its parameters get their gradients in another order than DDP's first buckets have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(128, WIDTH)
        self.norm = nn.LayerNorm(128)
        self.first = nn.Linear(WIDTH, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


Maker = Callable[[nn.Module], "tuple[Any, Any]"]
"""Makes the optimizer and the state of a wrapped model."""


def compressed(codec: str, feedback: str | bool = True) -> Maker:
    def make(model: nn.Module) -> tuple[Any, Any]:
        state = pycomm.compress(model, codec, feedback=feedback)
        return torch.optim.AdamW(model.parameters(), 1e-3), state

    return make


def coded(kind: str) -> Maker:
    def make(model: nn.Module) -> tuple[Any, Any]:
        if kind == "CodedAdamW":
            optimizer: Any = pycomm.CodedAdamW(model.parameters(), lr=1e-3, model=model)
        else:
            optimizer = pycomm.CodedSGD(model.parameters(), lr=1e-2, model=model)
        return optimizer, optimizer.compression

    return make


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def fresh(make: Maker, wrapper: str) -> tuple[Any, Any, Any]:
    if wrapper in SHARDS:
        mesh = init_device_mesh("cpu", SHARDS[wrapper], mesh_dim_names=("replicate", "shard"))
        model: nn.Module = fully_shard(Net(), mesh=mesh)
    else:  # buckets of a few parameters, whose order differs before and after DDP's first step
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.02, **WRAPPERS[wrapper])
    return model, *make(model)


def resume(rank: int, make: Maker, wrapper: str) -> int:
    """Resume a run in the natural order, compare it; return the number of saved buckets."""
    parts = fresh(make, wrapper)
    train(parts[0], parts[1], rank, range(SAVED))
    saved = copy.deepcopy([part.state_dict() for part in parts])
    train(parts[0], parts[1], rank, range(SAVED, END))
    want, norms = values(parts[0]), parts[2].residual_norms()
    for again in (fresh(make, wrapper), parts):  # also one that has advanced
        for part, state in zip(again, copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)
        train(again[0], again[1], rank, range(SAVED, END))
        assert equal(values(again[0]), want), wrapper
        assert again[2].residual_norms() == norms
    return len(saved[2]["about"][0].get("buckets", ()))


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_each_feedback_resumes_with_the_same_bits(rank, size, codec):
    for feedback in FEEDBACKS:
        assert resume(rank, compressed(codec, feedback), "plain") == 2


@on_ranks(3)
def test_each_wrapper_and_optimizer_resumes_with_the_same_bits(rank, size):
    for wrapper in WRAPPERS:
        for make in (compressed("int4"), coded("CodedAdamW"), coded("CodedSGD")):
            resume(rank, make, wrapper)


@on_ranks(4)
@pytest.mark.parametrize("wrapper", SHARDS)
def test_shards_resume_with_the_same_bits(rank, size, wrapper):
    stochastic = compressed("int4:rounding=stochastic")
    for make in (stochastic, coded("CodedAdamW"), coded("CodedSGD")):
        resume(rank, make, wrapper)


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_each_codec_resumes_with_the_same_bits_also_on_gloo(rank, size):
    for codec in ("powersgd:2", "topk:0.1", "sign", "nvfp4", "eden:bits=2,size=128"):
        resume(rank, compressed(codec), "plain")
    for codec in ("quant:bits=4,block=64,rounding=stochastic", "multiples:unit=0.5"):
        resume(rank, compressed(codec), "find_unused")


@on_ranks(2)
def test_buckets_of_another_model_are_not_used(rank, size):
    """Buckets that are not those of the checkpoint are reduced, and the state goes on."""
    model, optimizer, state = fresh(compressed("int4"), "plain")
    train(model, optimizer, rank, range(SAVED))
    saved = copy.deepcopy(state.state_dict())
    saved["about"][0]["buckets"][0].append("gone.weight")
    again, other, loaded = fresh(compressed("int4"), "plain")
    loaded.load_state_dict(saved)
    train(again, other, rank, range(3))
    assert loaded.step == state.step + 3


def test_a_failure_of_a_saved_bucket_is_raised():
    """The futures of earlier buckets are then given up with the backward."""

    def reduce(tensor: torch.Tensor, names: tuple[str, ...]) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(pycomm.Error("rank 0: gone"))
        return future

    buckets = SavedBuckets(
        [("a", "b")], {"a": 2, "b": 3}.__getitem__, reduce, lambda future: future.wait()
    )
    assert not buckets.reduce(torch.ones(3), ("b",), last=False).done()
    buckets.reduce(torch.ones(2), ("a",), last=True)
    with pytest.raises(pycomm.Error, match="gone"):
        buckets.finish()
