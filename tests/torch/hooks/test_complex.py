"""Complex parameters are reduced exactly, as two reals each, by every wrapper and backend."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.policy import Policy
from tests.extent import each_value
from tests.torch.harness import all_equal
from tests.torch.pool import on_ranks

BACKENDS = ["pycomm", "gloo"]


class Waves(nn.Module):
    """A complex matrix between real ones, in a shared bucket and in one of its own."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.turn = nn.Parameter(torch.randn(64, 64, dtype=dtype))
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x).to(self.turn.dtype) @ self.turn).abs().float())


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
    found = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return [torch.view_as_real(p).clone() if p.is_complex() else p.clone() for p in found]


def ddp(rank: int, size: int, spec: Any, dtype: torch.dtype, mb: float) -> list[torch.Tensor]:
    os.environ["DDP_DISABLE_COMM_MEM"] = "1"  # buckets in ordinary memory
    try:
        model = DistributedDataParallel(Waves(dtype), bucket_cap_mb=mb)
        if spec is not None:
            pycomm.compress(model, spec, feedback="residual")
        return train(model, rank)
    finally:
        del os.environ["DDP_DISABLE_COMM_MEM"]


WAYS = [(dtype, mb) for dtype in (torch.complex64, torch.complex128) for mb in (25, 0.02)]


def in_each_way(rank: int, size: int, *specs: Any) -> list[list[torch.Tensor]]:
    return [ddp(rank, size, spec, *way) for way in WAYS for spec in specs]


@pytest.fixture(scope="module")
def plain(pool):
    """Return the parameters that plain DDP reaches in each way."""
    return pool.run(in_each_way, None, backend="gloo")[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ddp_has_the_bits_of_plain_ddp(pool, plain, backend):
    first, second = pool.run(in_each_way, "fp32", "int8", backend=backend)
    for place, want in enumerate(plain):
        for rank in (first, second):
            assert all(torch.equal(a, b) for a, b in zip(rank[2 * place], want, strict=True))
        a, b = first[2 * place + 1], second[2 * place + 1]
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        # [turn, first.weight, ...]: the reals were compressed.
        assert not torch.equal(a[1], want[1])


@on_ranks(2, backend="gloo", then=all_equal)
def test_no_policy_compresses_complex_numbers(rank, size):
    specs = (Policy("powersgd:2", ()), "auto", "int4 warmup=2")
    return [p for spec in specs for p in ddp(rank, size, spec, torch.complex64, 25)]


class Turn(nn.Module):
    """A model with one dtype per FSDP2 unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 65, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def sharded(rank: int, size: int, spec: Any, shape: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Turn(), nn.Linear(65, 64))
    mesh = init_device_mesh("cpu", (size,))
    if shape == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for part in (*model, model):
        if shape == "replicate":
            replicate(part)
        else:
            fully_shard(part, mesh=mesh)
    if spec is not None:
        state = pycomm.compress(model, spec, weights=None if shape == "replicate" else spec)
        assert "complex numbers travel exactly" in state.summary()
    return train(model, rank)


def sharded_twice(rank: int, size: int, shape: str) -> list[torch.Tensor]:
    """Return the parameters with int8; those with an exact codec have the bits of plain FSDP2."""
    plain, exact, coded = (sharded(rank, size, spec, shape) for spec in (None, "fp32", "int8"))
    assert all(torch.equal(a, b) for a, b in zip(exact, plain, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(coded, plain, strict=True))
    return coded


@each_value
@pytest.mark.parametrize("shape", ["fsdp", "hsdp", "replicate"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fsdp2_has_the_bits_of_plain_fsdp2(pool, backend, shape):
    ranks = 4 if shape == "hsdp" else 2
    first, *others = pool.run(sharded_twice, shape, backend=backend, ranks=ranks)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bucket_of_another_size_is_refused(rank, size):
    """The sizes of a bucket and of its parameters are compared before anything is sent."""
    state = pycomm.HookState("int8")
    state.add("weight", torch.zeros(64, 64))
    state.begin_step()
    with pytest.raises(pycomm.Error, match=rf"rank {rank}: a bucket has 8192 values, .* have 4096"):
        state.reduce(torch.zeros(8192), ["weight"])
    assert dist.is_initialized()
