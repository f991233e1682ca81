"""A new member of a sharded model (FSDP2) gets its part from a rank that has the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pycomm
from pycomm import elastic

SMALL = 4096


def sharded(rank: int, size: int) -> None:
    """Two replicas of two parts each: each rank gets its part from the one that has the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(rank // 2)
    model = nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 5))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    new = rank >= 2
    for _ in range(0 if new else 3):
        model(torch.ones(4, 17)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    replicas = mesh["replica"].get_group()
    assert elastic.hand_over(model, optimizer, has=not new, group=replicas, chunk_bytes=SMALL) == 0

    def compare() -> None:
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        for tensor in [*model.parameters(), *(s[k] for s in states for k in sorted(s))]:
            own = tensor.detach()
            own = own.to_local() if isinstance(own, DTensor) else own
            theirs = own.clone()
            dist.broadcast(theirs, rank % 2, group=replicas)
            assert torch.equal(own, theirs)

    compare()
    assert len(optimizer.state) == 4
    model(torch.full((4, 17), 0.5)).square().sum().backward()
    optimizer.step()
    compare()
    # A member with another part has something else under the same name.
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replica"))
    with pytest.raises(pycomm.WireMismatch, match="of which this is the part"):
        elastic.hand_over(model, has=not new, group=other["replica"].get_group())


def test_members_of_a_sharded_model_hand_over_their_parts(pool):
    pool.run(sharded, ranks=4)
