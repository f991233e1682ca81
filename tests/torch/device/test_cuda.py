"""The backend on CUDA tensors: two ranks that share one GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.feedback import Feedback
from tests.torch.device.test_operations import (
    check_bits,
    check_capture,
    check_compressed,
    check_ddp,
    check_futures,
    check_hand_over,
    check_lifetimes,
    check_no_capture,
    check_operations,
    check_order,
    check_sends_during_a_copy,
)
from tests.torch.harness import equal, inputs, perceptron
from tests.torch.pool import Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(rank: int, ranks: int, store: dist.Store, path: str, check: Callable[..., Any]) -> Any:
    how = {"store": store, "rank": rank, "world_size": ranks, "timeout": timedelta(seconds=60)}
    dist.init_process_group("pycomm", pg_options=pycomm.Options(device_path=path), **how)
    return check(rank, ranks)


PATHS = pytest.mark.parametrize("path", ["host", "auto"])


def run(pool: Pool, path: str, check: Callable[..., Any], **more: Any) -> Any:
    return pool.run(on_gpu, path, functools.partial(check, **more), backend=None, deadline=120)


@PATHS
@pytest.mark.parametrize(
    "check",
    [
        check_operations,
        functools.partial(check_order, way="held"),
        check_sends_during_a_copy,
        check_lifetimes,
        check_futures,
        check_hand_over,
    ],
    ids=["operations", "order", "sends", "lifetimes", "futures", "hand-over"],
)
def test_operations_results_order_and_lifetimes(pool, check, path):
    run(pool, path, check, device="cuda")


def test_a_graph_captures_operations_among_peers(pool):
    run(pool, "auto", check_capture, device="cuda")


def test_operations_by_way_of_the_host_refuse_to_be_captured(pool):
    run(pool, "host", check_no_capture, device="cuda")


def mean_of_ranks(ranks: int, steps: int) -> list[torch.Tensor]:
    """Return the parameters after training on the mean of all ranks' gradients, in one process."""
    model = perceptron().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            loss = model(inputs(rank, step).cuda()).square().mean()
            (loss / ranks).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def check_fsdp(rank: int, ranks: int, device: str) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device, (ranks,))
    model = perceptron().to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(rank, step).to(device)).square().mean().backward()
        optimizer.step()
    return [p.detach().full_tensor().cpu() for p in model.parameters()]


@PATHS
@pytest.mark.parametrize("check", [check_ddp, check_fsdp])
def test_training_is_on_the_mean_of_the_gradients(pool, path, check):
    want = mean_of_ranks(2, 3)
    for got in run(pool, path, check, device="cuda"):
        # One process sums over the ranks in another order, inside of the gradients.
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_collectives_have_the_cpus_bits(pool, dtype):
    how = {"rule": Feedback(), "dtype": dtype, "exchanged": False}
    want = run(pool, "auto", check_bits, device="cpu", **how)
    assert equal(run(pool, "auto", check_bits, device="cuda", **how), want)


@PATHS
def test_compressed_gradients_have_the_same_bits_as_on_the_cpu(pool, path):
    want = run(pool, path, check_compressed, device="cpu")
    assert equal(run(pool, path, check_compressed, device="cuda"), want)
