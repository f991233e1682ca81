"""Weighted averages: sum(w g) / sum(w), exact and coded, and what happens if ranks disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.reduction.weights import factors
from tests.extent import each_value
from tests.torch.pool import on_ranks

BACKENDS = ["pycomm", "gloo"]


def net(side: int = 64) -> nn.Module:
    model = nn.Linear(side, side, bias=False)
    nn.init.ones_(model.weight)
    return model


def backward(model: nn.Module, gradient: float) -> torch.Tensor:
    """Give every weight of a layer this gradient; return the averaged one."""
    for parameter in model.parameters():
        parameter.grad = None
    side = 64
    (model(torch.full((1, side), gradient)).sum()).backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    grad: Any = parameter.grad
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()


# ---------------------------------------------------------------- factors


@pytest.mark.parametrize(
    ("weights", "want"),
    [
        ([5.0], [1.0]),
        ([0.0], [0.0]),
        ([1.0, 3.0], [0.5, 1.5]),
        ([0.0, 8.0], [0.0, 2.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([1e308, 1e308], [1.0, 1.0]),
        ([5e-324, 5e-324, 0.0], [1.5, 1.5, 0.0]),
    ],
)
def test_factors_add_up_to_the_number_of_ranks(weights, want):
    assert factors(weights) == want


# ---------------------------------------------------------------- averages


@on_ranks(3)
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_average_is_weighted_exactly(rank, size, codec):
    model = DistributedDataParallel(net())
    state = pycomm.compress(model, codec, weighted=True)
    # Powers of two, so that each of these averages is exact, also in a block of equal values.
    for weights in ([1.0, 1.0, 2.0], [0.0, 4.0, 4.0], [0.0, 0.0, 7.0]):
        state.set_weight(weights[rank])
        got = backward(model, float(rank + 1))
        want = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
        assert torch.equal(got, torch.full_like(got, want))


@on_ranks(3)
@each_value
@pytest.mark.parametrize("codec", ["int4", "topk:0.05"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_residuals_are_in_units_of_the_average(rank, size, codec):
    """What was received and what is still owed is the sum of all weighted averages."""
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    state = pycomm.compress(model, codec, weighted=True)
    (parameter,) = model.parameters()
    generator = torch.Generator().manual_seed(5)
    want = torch.zeros(64, 64, dtype=torch.float64)
    got = torch.zeros(64, 64, dtype=torch.float64)
    for _ in range(12):
        inputs = torch.randn(size, 64, generator=generator)
        weights = torch.randint(0, 9, (size,), generator=generator).double()
        weights[0] += 1
        state.set_weight(int(weights[rank]))
        parameter.grad = None
        model(inputs[rank : rank + 1]).sum().backward()
        got += parameter.grad.double()
        gradients = inputs.double()[:, None, :].expand(size, 64, 64)
        want += (weights[:, None, None] * gradients).sum(0) / weights.sum()
    state.settle()
    name = "weight"
    owed = state.residuals.added(name, 0, 64 * 64)
    owed = owed.double().view(64, 64)
    dist.all_reduce(owed)
    torch.testing.assert_close(got + owed, want, rtol=0, atol=1e-4)
    assert (got - want).abs().max() > 1e-3  # the residual is not nothing


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_fsdp2_are_weighted(rank, size):
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (size,)))
    state = pycomm.compress(model, "fp32", weighted=True)
    for weights in ([1.0, 3.0], [0.0, 2.0]):
        state.set_weight(weights[rank])
        got = backward(model, float(rank + 1))
        want = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
        assert torch.equal(got, torch.full_like(got, want))
    with pytest.raises(pycomm.Error, match="set_policy"):
        state.remove()


@on_ranks(4)
def test_hsdp_is_refused(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = fully_shard(net(), mesh=mesh)
    with pytest.raises(ValueError, match="HSDP averages inside a replica"):
        pycomm.compress(model, "int8", weighted=True)


# ---------------------------------------------------------------- zero and overflow


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_of_weight_zero_adds_nothing(rank, size):
    """A rank without data adds nothing, whatever its gradient is; all without: nothing moves."""
    model = DistributedDataParallel(net())
    state = pycomm.compress(model, "int8", weighted=True)
    state.set_weight(2 * rank)
    got = backward(model, float("nan") if rank == 0 else 3.0)
    assert torch.equal(got, torch.full_like(got, 3.0))
    state.set_weight(0)
    assert torch.equal(backward(model, 5.0), torch.zeros_like(got))
    assert state.overflows == 0


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_leaves_no_trace(rank, size):
    model = DistributedDataParallel(net())
    state = pycomm.compress(model, "int4", weighted=True)
    state.set_weight(rank + 1)
    backward(model, 1.0 + rank / 7)
    state.settle()
    before = state.residuals.state_dict()["weight"]
    state.set_weight(1)
    assert not backward(model, float("inf") if rank == 0 else 1.0).isfinite().any()
    state.settle()
    after = state.residuals.state_dict()["weight"]
    assert state.overflows == 1
    assert all(torch.equal(before[role], after[role]) for role in ("worker", "owner"))
    state.set_weight(1)
    assert backward(model, 1.0).isfinite().all()


# ---------------------------------------------------------------- disagreement and misuse


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_different_weights_are_told_before_sending(rank, size):
    model = DistributedDataParallel(net())
    with pytest.raises(pycomm.WireMismatch, match=r"rank 0 has .*weighted=False"):
        pycomm.compress(model, "int8", weighted=rank == 1)
    state = pycomm.compress(model, "int8")
    with pytest.raises(pycomm.Error, match="weighted=True"):
        state.set_weight(3)
    assert backward(model, rank + 1.0)[0, 0] == (size + 1) / 2


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_one_rank_forgot_is_an_error_on_all(rank, size):
    model = DistributedDataParallel(net())
    state = pycomm.compress(model, "int8", weighted=True)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight"):
            state.set_weight(bad)
    if rank != 1:
        state.set_weight(4)
        with pytest.raises(pycomm.Error, match="has a weight already"):
            state.set_weight(4)
    with pytest.raises(pycomm.Error, match="rank 1 has set no weight"):
        backward(model, 1.0)
    with pytest.raises(pycomm.Error, match="no context manager"), state:
        pass


@on_ranks(2)
def test_accumulated_gradients_have_one_weight(rank, size):
    model = DistributedDataParallel(net())
    state = pycomm.compress(model, "fp32", weighted=True)
    state.set_weight([1, 3][rank])
    with model.no_sync():
        model(torch.full((1, 64), float(rank))).sum().backward()
    model(torch.full((1, 64), float(rank))).sum().backward()
    (parameter,) = model.parameters()
    assert torch.equal(parameter.grad, torch.full_like(parameter.grad, 2 * 3 / 4))


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_join_a_rank_without_data_weighs_nothing(rank, size):
    """A rank that has no more batches weighs nothing, and need not say so."""
    model = DistributedDataParallel(net())
    state = pycomm.compress(model, "fp32", weighted=True)
    seen = []
    with model.join():
        for _ in range(1 + rank):
            state.set_weight([2, 6][rank])
            seen.append(backward(model, 1.0 + rank)[0, 0].item())
    assert seen[0] == (2 * 1 + 6 * 2) / 8
    if rank == 1:
        assert seen[1] == 2.0
