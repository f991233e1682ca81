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
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from pycomm.feedback import storage
from tests.torch.fsdp.test_compress import SHAPES, gradients, whole
from tests.torch.harness import Chosen, equal, near, values
from tests.torch.optim.plain_agreement import SIZES, PlainAdamW
from tests.torch.optim.test_coded_adamw import alike

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


def against_the_formula(rank: int, size: int, codec: str) -> list[torch.Tensor]:
    model, optimizer = make(size, codec, refresh=1)
    plain = {
        n: PlainAdamW(whole(getattr(model, n)).detach(), size, codec, size)
        for n in ("big", "small")
    }
    for number in range(6):
        step(model, optimizer, gradients(rank, number))
        for name, reference in plain.items():
            reference.step([gradients(r, number)[name] for r in range(size)])
            # Round-off of float32 in another order, times the steps. A sign that round-off turns
            # would be an error of a thousand times that.
            torch.testing.assert_close(
                whole(getattr(model, name)), reference.x, rtol=1e-4, atol=2e-6
            )
    return values(model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_is_that_of_the_formula(pool, ranks):
    for codec in ("sign", "topk:0.02"):
        native = pool.run(against_the_formula, codec, ranks=ranks)
        assert all(equal(result, native[0]) for result in native)
        if ranks == 2:  # the sum of more numbers depends on the order in which a backend adds them
            assert equal(native[0], pool.run(against_the_formula, codec, backend="gloo")[0])


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


def test_shards_have_the_bits_of_ddp_if_ranks_have_the_same_gradients(pool):
    """Of a codec that sends values as they are: else what was sent is known to round-off."""
    pool.run(beside_ddp, "fsdp", SENT_AS_IT_IS, True)


def replicas_of_shards(rank: int, size: int) -> None:
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


def test_replicas_of_shards_have_the_bits_of_ddp(pool):
    pool.run(replicas_of_shards, ranks=4)


# ---------------------------------------------------------------- training loops


def accumulates(rank: int, size: int, shape: str) -> None:
    (a, one), (b, two) = make(size, shape=shape), make(size, shape=shape)
    for number in range(3):
        first, second = integers(rank, number, SHAPES), integers(rank, number + 50, SHAPES)
        step(a, one, {name: first[name] + second[name] for name in first})
        two.zero_grad()
        b.set_requires_gradient_sync(False)
        b(first).backward()
        b.set_requires_gradient_sync(True)
        b(second).backward()
        two.step()
    assert equal(values(a), values(b))
    assert alike(one, two)


def two_backwards(rank: int, size: int, shape: str) -> None:
    """The momentum of two reductions: b m + (1 - b) (g1 + g2), since nothing is left over."""
    model, optimizer = make(size, "topk:1.0", shape)
    betas: dict[str, float] = {}
    for number in range(3):
        before = {
            n: whole(optimizer.state[getattr(model, n)]["exp_avg"]).clone() if number else 0.0
            for n in ("big", "small")
        }
        step(model, optimizer, *(gradients(rank, 10 * number + part) for part in range(2)))
        for name, moment in optimizer.compression.moments.items():
            given = [gradients(r, 10 * number + p)[name] for r in range(size) for p in range(2)]
            b = betas.get(name, 0.0)
            want = (1 - b) * sum(given) / size + b * before[name]
            # Round-off of a dozen operations on values of about 1.
            got = whole(getattr(model, name).grad)
            if number:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
            betas[name] = moment.beta


def thrown_away(rank: int, size: int, shape: str, to_none: bool) -> None:
    (a, one), (b, two) = make(size, shape=shape), make(size, shape=shape)
    for number in range(4):
        step(a, one, gradients(rank, number))
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, number + 50)).backward()
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, number)).backward()
        two.step()
    assert equal(values(a), values(b))
    one.compression.settle()
    assert alike(one, two)


def overflows(rank: int, size: int, shape: str) -> None:
    a, one = make(size, shape=shape)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    b, two = make(size, shape=shape, scaler=scaler)
    for number in range(5):
        if number != 2:
            step(a, one, gradients(rank, number))
        two.zero_grad()
        given = gradients(rank, number)
        if number == 2 and rank == size - 1:
            given["big"][3, 4] = float("inf")
        scaler.scale(b(given)).backward()
        scaler.step(two)
        scaler.update()
    assert scaler.get_scale() == 512
    assert two.compression.overflows == 1
    # The loss scale is a power of two, so it changes no bit.
    assert equal(values(a), values(b))
    assert alike(one, two)


@pytest.mark.parametrize(("shape", "ranks"), [("fsdp", 2), ("hsdp", 4)])
class TestLoops:
    def test_gradients_accumulate_without_synchronization(self, pool, shape, ranks):
        pool.run(accumulates, shape, ranks=ranks)

    def test_two_backwards_before_a_step_add_up(self, pool, shape, ranks):
        pool.run(two_backwards, shape, ranks=ranks)

    def test_gradients_that_are_thrown_away_leave_nothing(self, pool, shape, ranks):
        for to_none in (True, False):
            pool.run(thrown_away, shape, to_none, ranks=ranks)

    def test_a_step_that_overflows_leaves_no_trace(self, pool, shape, ranks):
        pool.run(overflows, shape, ranks=ranks)


def exactly(rank: int, size: int) -> None:
    """A codec that is exact, clipped by norm, with two groups: torch's AdamW."""
    a, b = wrapped("fsdp", size), wrapped("fsdp", size)
    results = []
    for model, kind in ((a, pycomm.CodedAdamW), (b, torch.optim.AdamW)):
        coded = kind is pycomm.CodedAdamW
        options = {"model": model, "codec": "fp32"} if coded else {}
        groups = [{"params": [model.big]}, {"params": [model.small, model.bias], "lr": 0.1}]
        optimizer = kind(groups, **SIZES, **options)
        for number in range(3):
            optimizer.zero_grad()
            model(gradients(rank, number)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.append(values(model))
    assert near(*results)


def test_exact_parameters_move_as_with_adamw(pool):
    pool.run(exactly, ranks=3)


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
    assert alike(optimizer, loaded)
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


def test_a_checkpoint_goes_on_with_the_same_bits_and_on_other_ranks(pool, tmp_path):
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


def test_what_was_sent_of_large_parameters_is_kept_in_16_bits(pool):
    for want, got in pool.run(in_16_bits):
        assert want == got


# ---------------------------------------------------------------- what is refused


def refused(rank: int, size: int) -> dict[str, str]:
    def text(act: Any) -> str:
        try:
            act()
        except (Error, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def make_one(model: nn.Module) -> str:
        return text(lambda: pycomm.CodedAdamW(model.parameters(), model=model))

    columns = fully_shard(nn.Linear(64, 64), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    divided = wrapped("fsdp", size)
    divided.set_gradient_divide_factor(3.0)
    partly, optimizer = make(size)
    step(partly, optimizer, gradients(rank, 0))
    later, _ = make(size)
    later.set_gradient_divide_factor(3.0)
    twice = wrapped("fsdp", size)
    pycomm.compress(twice, "int8")
    return {
        "columns": make_one(columns),
        "divided": make_one(divided),
        "twice": make_one(twice),
        "partly": text(lambda: partly(gradients(rank, 1, ["big"])).backward()),
        "later": text(lambda: later(gradients(rank, 1)).backward()),
    }


def test_what_cannot_work_is_refused(pool):
    words = {
        "columns": "ValueError: CodedAdamW: weight is sharded by dimension 1",
        "divided": "Error: torch sums the gradients",
        "twice": "Error: this model, or a part of it, is compressed already",
        "partly": "set_reduce_scatter_unused_params(True)",
        "later": "torch sums the gradients",
    }
    for found in pool.run(refused):
        for what, text in words.items():
            assert text in found[what], (what, found[what])
