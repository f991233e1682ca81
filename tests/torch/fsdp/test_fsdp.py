"""FSDP2 and HSDP on pycomm, as on Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.torch.harness import equal, inputs, perceptron, same_as_gloo


def sharded(mesh: DeviceMesh, **options: Any) -> FSDPModule:
    model = perceptron()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module, rank: int, clip: bool = False) -> list[torch.Tensor]:
    """Return the norms of the gradients, followed by the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01)
            seen.append(norm.full_tensor().detach().clone())
        optimizer.step()
    return seen + [p.full_tensor().detach().clone() for p in model.parameters()]


def fsdp(rank: int, size: int, dtypes: tuple[torch.dtype, torch.dtype] | None) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(*dtypes) if dtypes else MixedPrecisionPolicy()
    model = sharded(mesh, mp_policy=policy)
    seen = train(model, rank, clip=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return seen, dict(whole)


@pytest.mark.parametrize(
    "dtypes",
    [None, (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16,) * 2],
    ids=str,
)
def test_fsdp2(pool, dtypes):
    (a, whole), (b, nothing) = same_as_gloo(pool, fsdp, dtypes)
    assert equal(a, b)
    assert len(whole) == 8
    assert equal(nothing, whole)


def divided(rank: int, size: int, factor: float | None) -> list[torch.Tensor]:
    model = sharded(init_device_mesh("cpu", (size,)))
    if factor is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
    model(inputs(rank, 0)).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_gradient_divide_factor(pool):
    """Gloo fails here, so this compares with the plain average: powers of two are exact."""
    (plain, _), (scaled, _) = (pool.run(divided, factor) for factor in (None, 8.0))
    assert equal(scaled, [g / 4 for g in plain])


def hsdp(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(sharded(mesh), rank, clip=True)


def test_hsdp(pool):
    a, *others = same_as_gloo(pool, hsdp, ranks=4)
    for other in others:
        assert equal(a, other)
