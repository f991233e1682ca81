"""CodedAdamW on FSDP2: the formula of DDP, on shards."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.feedback import storage
from tests.torch.fsdp.test_compress import SHAPES, gradients, whole
from tests.torch.harness import Chosen, all_equal, equal, near, values
from tests.torch.optim.plain_agreement import SIZES, PlainAdamW
from tests.torch.optim.test_loops import assert_alike
from tests.torch.pool import on_ranks

UNIT = 0.01  # so that no parameter is 0
EXACTLY = "residual:storage=float32"
# Shards of two ranks end where a block or chunk of 4096 values ends.
EVEN = {"big": (64, 128), "wide": (32, 256), "bias": (50,)}
SENT_AS_IT_IS = "topk:0.05,indices=int12"


def wrapped(shape: str, size: int, shapes: Any = SHAPES) -> nn.Module:
    model = Chosen(shapes, UNIT)
    if shape == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if shape == "replicate":
        return replicate(model)
    mesh = init_device_mesh("cpu", (size,))
    if shape == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def make(
    size: int, codec: str = "sign", shape: str = "fsdp", shapes: Any = SHAPES, **options: Any
) -> tuple[nn.Module, pycomm.CodedAdamW]:
    model = wrapped(shape, size, shapes)
    options = {**SIZES, "feedback": EXACTLY, **options}
    return model, pycomm.CodedAdamW(model.parameters(), model=model, codec=codec, **options)


def step(model: nn.Module, optimizer: Any, *given: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    for one in given:
        model(one).backward()
    optimizer.step()


def integers(rank: int, number: int, shapes: Any = EVEN) -> dict[str, torch.Tensor]:
    """Gradients whose squares add up to the same in any order."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return {n: torch.randint(-9, 10, s, generator=generator).float() for n, s in shapes.items()}


# ---------------------------------------------------------------- the formula


@on_ranks(then=all_equal)
@pytest.mark.parametrize(("shape", "ranks"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)])
@pytest.mark.parametrize("codec", ["sign", "topk:0.02"])
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_step_is_that_of_the_formula(rank, size, shape, codec):
    model, optimizer = make(size, codec, shape, refresh=1)
    named = dict(getattr(model, "module", model).named_parameters())
    shards = size if shape == "fsdp" else 1
    plain = {n: PlainAdamW(whole(named[n]).detach(), size, codec, shards) for n in ("big", "small")}
    for number in range(6):
        step(model, optimizer, gradients(rank, number))
        for name, reference in plain.items():
            reference.step([gradients(r, number)[name] for r in range(size)])
            here = named[name]
            # Round-off of float32 in another order, times the steps. A sign that round-off turns
            # would be an error of a thousand times that.
            torch.testing.assert_close(whole(here), reference.x, rtol=1e-4, atol=2e-6)
            torch.testing.assert_close(whole(here.grad), reference.m, rtol=1e-4, atol=1e-5)
    return values(model)


# ---------------------------------------------------------------- that of DDP


def beside_ddp(rank: int, size: int, shape: str, codec: str, alike: bool) -> None:
    (a, one), (b, two) = (make(size, codec, s, EVEN, refresh=2) for s in ("ddp", shape))
    for number in range(5):
        given = integers(0 if alike else rank, number)
        step(a, one, given)
        step(b, two, given)
    assert equal(values(a), values(b))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        for key, value in one.state[p].items():
            there = whole(two.state[q][key])
            # The errors are added up in another order.
            assert torch.equal(value, there) or key == "coding_error", key


def test_replicas_have_the_bits_of_ddp(pool):
    pool.run(beside_ddp, "replicate", "sign", False)


def test_shards_of_equal_gradients_have_the_bits_of_ddp(pool):
    """Of a codec that sends values as they are: else what was sent is known to round-off."""
    pool.run(beside_ddp, "fsdp", SENT_AS_IT_IS, True)


@on_ranks(4)
def test_replicas_of_shards_have_the_bits_of_ddp(rank, size):
    """Two replicas with one gradient each are DDP on two ranks."""
    model, optimizer = make(size, "sign", "hsdp", EVEN, refresh=2)
    group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    plain = DistributedDataParallel(
        Chosen(EVEN, UNIT), process_group=group, find_unused_parameters=True
    )
    options = {**SIZES, "feedback": EXACTLY, "refresh": 2}
    ddp = pycomm.CodedAdamW(plain.parameters(), model=plain, codec="sign", **options)
    for number in range(4):
        given = integers(rank // 2, number)
        step(model, optimizer, given)
        step(plain, ddp, given)
    assert equal(values(model), values(plain))


@on_ranks(3)
@pytest.mark.parametrize("shape", ["ddp", "fsdp"])
def test_exact_parameters_move_as_with_adamw(rank, size, shape):
    """A codec that is exact, clipped by norm, with two groups: torch's AdamW."""
    a, b = wrapped(shape, size), wrapped(shape, size)
    results = []
    for model, kind in ((a, pycomm.CodedAdamW), (b, torch.optim.AdamW)):
        coded = kind is pycomm.CodedAdamW
        options = {"model": model, "codec": "fp32"} if coded else {}
        big, *others = model.parameters()
        groups = [{"params": [big]}, {"params": others, "lr": 0.1}]
        optimizer = kind(groups, **SIZES, **options)
        for number in range(3):
            optimizer.zero_grad()
            model(gradients(rank, number)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.append(values(model))
    assert near(*results)


# ---------------------------------------------------------------- state


def saves(rank: int, size: int, path: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Train, save, and train on from the checkpoint beside the original."""
    model, optimizer = make(size)
    for number in range(3):
        step(model, optimizer, gradients(rank, number))
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "pycomm": optimizer.compression.state_dict(),
    }
    dcp.save(state, checkpoint_id=path)
    before = deepcopy(totals(optimizer))
    again, loaded = load(size, path)
    for number in range(3, 5):
        for one, other in ((model, optimizer), (again, loaded)):
            step(one, other, gradients(rank, number))
    assert equal(values(model), values(again))
    assert_alike(optimizer, loaded)
    return before, []


def load(size: int, path: str) -> tuple[nn.Module, pycomm.CodedAdamW]:
    model, optimizer = make(size)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    optimizer.compression.load_checkpoint(Path(path))
    return model, optimizer


def totals(optimizer: pycomm.CodedAdamW) -> dict[str, Any]:
    """The momentum, the ranks' mean of what was sent, and what they owe, of whole parameters."""
    found: dict[str, Any] = {}
    compression = optimizer.compression
    for name, moment in compression.moments.items():
        found[f"{name}.momentum"] = whole(moment.state["exp_avg"]).clone()
        kept = ("row", "column", "moment_weight", "coding_error", "mean_energy", "own_energy")
        for key in kept:
            found[f"{name}.{key}"] = moment.state[key].clone()
        for kind, kept in (("sent", compression.own), ("owed", compression.residuals)):
            total = torch.zeros(SHAPES[name]).flatten()
            if name in kept:
                total += kept[name].current("worker")[: total.numel()] / dist.get_world_size()
            dist.all_reduce(total)
            found[f"{name}.{kind}"] = total.view(SHAPES[name])
    return found


def loads(rank: int, size: int, path: str) -> dict[str, Any]:
    model, optimizer = load(size, path)
    found = deepcopy(totals(optimizer))
    step(model, optimizer, gradients(rank, 3))
    return found


def test_a_checkpoint_goes_on_with_the_same_bits(pool, tmp_path):
    before = pool.run(saves, str(tmp_path), ranks=2)[0][0]
    for name in ("big", "small"):  # the ranks' mean of what they have sent is the momentum
        torch.testing.assert_close(before[f"{name}.sent"], before[f"{name}.momentum"])
        assert float(before[f"{name}.owed"].norm()) > 0
    for found in pool.run(loads, str(tmp_path), ranks=3):
        assert found.keys() == before.keys()
        for key, value in found.items():
            # One rounding of each addition.
            torch.testing.assert_close(value, before[key], rtol=1e-5, atol=1e-6, msg=key)


def converts(rank: int, size: int, shape: str) -> None:
    model = wrapped(shape, size)
    torchs = torch.optim.AdamW(model.parameters(), **SIZES)
    for number in range(3):
        step(model, torchs, gradients(rank, number))
    full = whole(torchs.state[model.big]["exp_avg_sq"])
    optimizer = pycomm.code_optimizer(torchs, model, "sign")
    state = optimizer.state[model.big]
    # Sums of float32 numbers in another order.
    torch.testing.assert_close(state["row"], full.sum(1))
    torch.testing.assert_close(state["column"], full.sum(0))
    again = whole(optimizer.to_adamw().state[model.big]["exp_avg_sq"])
    torch.testing.assert_close(again.sum(1), state["row"], rtol=1e-4, atol=0)
    torch.testing.assert_close(again.sum(0), state["column"], rtol=1e-4, atol=0)
    step(model, optimizer, gradients(rank, 3))


def test_states_convert_to_those_of_adamw_and_back(pool):
    pool.run(converts, "fsdp", ranks=3)
    pool.run(converts, "hsdp", ranks=4)


def in_16_bits(rank: int, size: int) -> list[int]:
    model = fully_shard(Chosen({"big": (512, 256), "bias": (9,)}))
    optimizer = pycomm.CodedAdamW(model.parameters(), model=model, **SIZES)
    generator = torch.Generator().manual_seed(rank)
    given = {"big": torch.randn(512, 256, generator=generator), "bias": torch.zeros(9)}
    for _ in range(2):
        step(model, optimizer, given)
    sent = optimizer.compression.own["big"].worker[0]
    assert torch.equal(whole(model.big).isfinite(), torch.ones(512, 256, dtype=torch.bool))
    assert optimizer.compression.residual_bytes == 4 * sent.numel() * sent.element_size()
    return [storage.count("bf16", 256 * 256, 2), sent.numel() * sent.element_size()]


def test_sent_values_of_large_parameters_use_16_bits(pool):
    for want, got in pool.run(in_16_bits):
        assert want == got
