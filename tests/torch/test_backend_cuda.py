"""The backend on CUDA tensors: two ranks that share one GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_checks import (
    check_compressed,
    check_ddp,
    check_futures,
    check_lifetimes,
    check_operations,
    check_order,
)
from parity import inputs, network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "check",
    [
        check_operations,
        functools.partial(check_order, held=True),
        check_lifetimes,
        check_futures,
    ],
    ids=["operations", "order", "lifetimes", "futures"],
)
def test_operations_results_order_and_lifetimes(pool, check):
    pool.run(functools.partial(check, device="cuda"), deadline=120)


def mean_of_ranks(ranks: int, steps: int) -> list[torch.Tensor]:
    """The parameters after training on the mean of all ranks' gradients, in one process."""
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            loss = model(inputs(rank, step).cuda()).square().mean()
            (loss / ranks).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    # The sum over ranks is taken in another order: in the gradients of one process.
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_ddp_trains_on_the_mean_of_the_gradients(pool):
    want = mean_of_ranks(2, 3)
    for got in pool.run(functools.partial(check_ddp, device="cuda"), deadline=120):
        close(got, want)


def check_fsdp(rank: int, ranks: int) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cuda", (ranks,))
    model = network().cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(rank, step).cuda()).square().mean().backward()
        optimizer.step()
    return [p.detach().full_tensor().cpu() for p in model.parameters()]


def test_fsdp_trains_on_the_mean_of_the_gradients(pool):
    want = mean_of_ranks(2, 3)
    for got in pool.run(check_fsdp, deadline=120):
        close(got, want)


def test_compressed_gradients_have_the_same_bits_as_on_the_cpu(pool):
    want: Any = pool.run(functools.partial(check_compressed, device="cpu"), deadline=120)
    got = pool.run(functools.partial(check_compressed, device="cuda"), deadline=120)
    for mine, theirs in zip(got, want, strict=True):
        for g, w in zip(mine, theirs, strict=True):
            assert torch.equal(g, w)
