"""Replica checks: differing replicas are named within a step, results by the next call."""

from __future__ import annotations

import mmap
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.hooks.replicas import _Watch, digest
from tests.torch.harness import batch, network

FLIPPED, END = 3, 6  # the step after which a bit flips, and the last step


def start(store: Any, rank: int, size: int, check: str = "results", **options: Any) -> Any:
    options = pycomm.Options(check=check, **options)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, pg_options=options)
    return options


def flip(parameter: torch.Tensor) -> None:
    """Flip the lowest bit of one value."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    local.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def train(model: nn.Module, rank: int, bad: bool) -> tuple[int, str]:
    """Train; return the step in which an error came, and its text."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(END):
        x, y = batch(rank, step)
        try:
            nn.functional.cross_entropy(model(x), y).backward()
        except pycomm.Error as error:
            return step, str(error)
        optimizer.step()
        optimizer.zero_grad()
        if bad and step == FLIPPED:
            flip(next(model.parameters()))
    return END, ""


def ddp(
    rank: int, size: int, store: Any, codec: str, bad: int | None, options: dict[str, Any]
) -> tuple[int, str]:
    start(store, rank, size, **options)
    try:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        pycomm.compress(model, codec)
        return train(model, rank, rank == bad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("codec", "ranks", "transport"),
    [
        ("fp32", 3, "tcp"),
        ("int4", 3, "shm"),
        ("int4", 4, "tcp"),
        ("fp32", 2, "shm"),
    ],
)
def test_a_flipped_bit_is_found_in_the_next_step(pool, codec, ranks, transport):
    options = {"transport": transport}
    answers = pool.run(ddp, codec, ranks - 1, options, ranks=ranks, backend=None)
    assert len(set(answers)) == 1
    ((step, text),) = set(answers)
    assert step == FLIPPED + 1
    sides = (
        "rank 0 against rank 1; no majority"
        if ranks == 2
        else f"rank {ranks - 1} has other bytes than ranks 0-{ranks - 2}"
    )
    assert text.startswith(f"ranks disagree on the parameters before step {step + 1}: {sides}")


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_equal_replicas_train_on(pool, codec):
    assert pool.run(ddp, codec, None, {}, backend=None) == [(END, "")] * 2


def test_nothing_is_compared_where_nobody_asks(pool):
    assert pool.run(ddp, "int4", 1, {"check": "none"}, backend=None) == [(END, "")] * 2


def hsdp(rank: int, size: int, store: Any, codec: str) -> tuple[int, str]:
    options = start(store, rank, size)
    try:
        mesh = init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("replicate", "shard"),
            backend_override={"replicate": ("pycomm", options)},
        )
        model = network()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        pycomm.compress(model, codec)
        return train(model, rank, rank == 3)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_replicas_of_shards_are_compared(pool, codec):
    answers = pool.run(hsdp, codec, ranks=4, backend=None)
    assert [step for step, _ in answers] == [FLIPPED + 1] * 4
    told = f"ranks disagree on the parameters before step {FLIPPED + 2}: rank 0 against rank 1"
    for rank in (1, 3):  # ranks 0 and 1 among those that hold these shards
        assert answers[rank][1].startswith(told)


def results(rank: int, size: int, store: Any) -> str:
    start(store, rank, size)
    try:
        x, parts = torch.ones(8), [torch.empty(8) for _ in range(size)]
        if rank == 2:  # a rank that keeps two parts in one place, which their addresses do not show
            memory = os.memfd_create("parts")
            os.truncate(memory, mmap.PAGESIZE)
            for i in range(2):
                page = mmap.mmap(memory, mmap.PAGESIZE)
                parts[i] = torch.frombuffer(page, dtype=torch.float32, count=8)
            os.close(memory)
        dist.all_gather(parts, x * rank)
        with pytest.raises(pycomm.WireMismatch) as caught:
            dist.all_reduce(x, async_op=True).wait()
        return str(caught.value)
    finally:
        dist.destroy_process_group()


def test_a_different_result_is_found_next(pool):
    answers = pool.run(results, ranks=3, backend=None)
    assert len(set(answers)) == 1
    assert re.match(
        r"ranks disagree on the result of all_gather #1 \(8 float32\): rank 2 has other bytes than "
        r"ranks 0-1; found by all_reduce #2 \(sum of 8 float32\)",
        answers[0],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_digest_sees_every_bit(dtype):
    x = torch.arange(7).float().to(dtype)
    y = x.clone()
    assert digest([x, x]) == digest([x, y])
    y.view(torch.uint8)[-1:].bitwise_xor_(0x40)
    assert digest([x, x]) != digest([x, y])
    assert digest([torch.empty(0)]) > 0


def compressed_twice(rank: int, size: int, store: Any) -> tuple[list[int], tuple[int, str]]:
    """Return the number of watches after each `compress`, and the end of a training with a flip."""
    start(store, rank, size)
    try:
        model = DistributedDataParallel(network())
        counts = []
        for _ in range(2):
            with pycomm.compress(model, "int4"):
                watches = [h for h in model._forward_pre_hooks.values() if isinstance(h, _Watch)]
                counts.append(len(watches))
                train(model, rank, False)
            train(model, rank, False)  # the residuals are sent, and compression ends
        return counts, train(model, rank, rank == 1)
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_compressed_again_is_compared_once(pool):
    for counts, (step, text) in pool.run(compressed_twice, backend=None):
        assert counts == [1, 1]
        assert step == FLIPPED + 1
        assert text.startswith("ranks disagree on the parameters")
