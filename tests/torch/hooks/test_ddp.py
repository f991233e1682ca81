"""Features of DistributedDataParallel beyond the plain loop of test_ddp_compress.py, as on Gloo."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.torch.harness import WIDTH, inputs, perceptron, same_as_gloo
from tests.torch.hooks.test_complex import Waves, data
from tests.torch.pool import on_ranks


class Branching(nn.Module):
    """Uses a different half of itself in every other step, so that parameters are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = perceptron()

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.halves[way % 2](x)


def train(rank: int, size: int, options: dict[str, Any], way: str) -> list[torch.Tensor]:
    net = Branching() if way == "branching" else perceptron()
    model = DistributedDataParallel(net, bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        arguments = (step + rank,) if way == "branching" else ()
        unsynced = way == "accumulate" and step % 3 < 2
        with model.no_sync() if unsynced else nullcontext():
            model(inputs(rank, step), *arguments).square().mean().backward()
        if not unsynced:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"find_unused_parameters": True}, "branching"),
        ({"static_graph": True}, "plain"),
        ({"gradient_as_bucket_view": True}, "accumulate"),
    ],
)
def test_options(pool, options, way):
    a, b = same_as_gloo(pool, train, options, way)
    assert all(map(torch.equal, a, b))


def join_uneven(rank: int, size: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.002)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(inputs(rank, step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_join_with_uneven_inputs(pool):
    a, b = same_as_gloo(pool, join_uneven)
    assert all(map(torch.equal, a, b))


def zero(rank: int, size: int) -> Any:
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
    return [p.detach().clone() for p in model.parameters()], state


def test_zero_redundancy_optimizer(pool):
    same_as_gloo(pool, zero)


def check_sync_batch_norm(rank: int, size: int) -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(WIDTH))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DistributedDataParallel(net)


def test_sync_batch_norm_is_for_gpus_on_any_backend(pool):
    for backend in ("pycomm", "gloo"):
        pool.run(check_sync_batch_norm, backend=backend)


def compiled(rank: int, size: int) -> Any:
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


def test_torch_compile(pool):
    same_as_gloo(pool, compiled)


def objects(rank: int, size: int) -> Any:
    mine = {"rank": rank, "text": "x" * (10 + 1000 * rank), "set": {rank}}
    gathered = [None] * size
    dist.all_gather_object(gathered, mine)
    at_root = [None] * size if rank == 0 else None
    dist.gather_object(mine, at_root, dst=0)
    sent = [mine, [rank]] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, src=1)
    scattered = [None]
    dist.scatter_object_list(scattered, [(r, "part") for r in range(size)] if rank == 0 else None)
    if rank == 0:
        dist.send_object_list([mine], dst=1)
        received = None
    else:
        received = [None]
        dist.recv_object_list(received, src=0)
    return gathered, at_root, sent, scattered, received


def test_object_collectives(pool):
    same_as_gloo(pool, objects)


def train_complex(rank: int, size: int, options: dict[str, Any]) -> list[torch.Tensor]:
    model = DistributedDataParallel(Waves(), bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):  # after the first step torch rebuilds the buckets
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_complex_parameters(pool, options):
    a, b = same_as_gloo(pool, train_complex, options)
    assert all(map(torch.equal, a, b))


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
