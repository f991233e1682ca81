"""Optimizers, compilers and dtypes with DistributedDataParallel, as on Gloo.

`make conformance` has torch's own tests of its options, of Join and of object collectives.
"""

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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.policy import Policy
from tests.extent import each_value
from tests.torch.harness import all_equal, equal, inputs, on_both, perceptron, values
from tests.torch.pool import on_ranks


@on_both(2)
def test_zero_redundancy_optimizer(rank, size):
    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True
    )
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if rank == 0 else None
    return values(model), state


@on_both(2)
def test_torch_compile(rank, size):
    from torch.distributed import _functional_collectives as functional

    def reduce(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        parts = functional.reduce_scatter_tensor(total, "sum", 0, dist.group.WORLD)
        return functional.all_gather_tensor(parts, 0, dist.group.WORLD) + 1

    # aot_eager traces and partitions like inductor, without the seconds of the C++ compiler.
    results = [torch.compile(reduce, backend="aot_eager", fullgraph=True)(inputs(rank, 0))]
    torch._dynamo.reset()
    model = torch.compile(DistributedDataParallel(perceptron()), backend="aot_eager")
    for step in range(2):
        model(inputs(rank, step)).square().mean().backward()
    torch._dynamo.reset()
    return results + [p.grad.clone() for p in model.parameters()]


@on_both(2, then=all_equal)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_complex_parameters(rank, size, options):
    model = DistributedDataParallel(Waves(), bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):  # after the first step torch rebuilds the buckets
        model(waves(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@on_ranks(2)
def test_complex_tensors_are_allocated_as_such(rank, size):
    """For callers other than DDP the memory has the requested dtype."""
    native: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    x = native.allocate_tensor(6, dtype=torch.complex64, device=torch.device("cpu"))
    assert x.dtype == torch.complex64
    assert x.shape == (6,)
    x.fill_(1 + 2j)
    dist.all_reduce(x)
    assert x.tolist() == [size * (1 + 2j)] * 6


# ------------------------------------------------------------------------------------------ complex
# Complex parameters are reduced exactly, as two reals each, by every wrapper and backend.


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


def waves(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def train_waves(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        model(waves(rank, step)).square().mean().backward()
        optimizer.step()
    found = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return [torch.view_as_real(p).clone() if p.is_complex() else p.clone() for p in found]


def ddp(rank: int, size: int, spec: Any, dtype: torch.dtype, mb: float) -> list[torch.Tensor]:
    os.environ["DDP_DISABLE_COMM_MEM"] = "1"  # buckets in ordinary memory
    try:
        model = DistributedDataParallel(Waves(dtype), bucket_cap_mb=mb)
        if spec is not None:
            pycomm.compress(model, spec, feedback="residual")
        return train_waves(model, rank)
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
    assert equal(first, second)
    assert equal(first[::2], plain)
    for coded, want in zip(first[1::2], plain, strict=True):
        # [turn, first.weight, ...]: the reals were compressed.
        assert not torch.equal(coded[1], want[1])


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
        state = pycomm.compress(model, spec)
        assert "complex numbers travel exactly" in state.summary()
    return train_waves(model, rank)


@on_ranks(then=all_equal)
@each_value
@pytest.mark.parametrize(("shape", "ranks"), [("fsdp", 2), ("hsdp", 4), ("replicate", 2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fsdp2_has_the_bits_of_plain_fsdp2(rank, size, shape):
    plain, exact, coded = (sharded(rank, size, spec, shape) for spec in (None, "fp32", "int8"))
    assert equal(exact, plain)
    assert not equal(coded, plain)
    return coded


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bucket_of_another_size_is_refused(rank, size):
    """The sizes of a bucket and of its parameters are compared before anything is sent."""
    state = pycomm.CompressionState("int8")
    state.add("weight", torch.zeros(64, 64))
    state.begin_step()
    with pytest.raises(pycomm.Error, match=rf"rank {rank}: a bucket has 8192 values, .* have 4096"):
        state.reduce(torch.zeros(8192), ["weight"])
    assert dist.is_initialized()
