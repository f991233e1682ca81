"""Promises of all optimizers to which each rank brings the gradients of its own data."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error, WireMismatch
from tests.extent import FULL, pairs
from tests.torch.hooks.test_ddp_compress import SHAPES, Chosen, equal, gradients
from tests.torch.optim.test_coded_adamw import train, values

CALM = {"find_unused_parameters": True}
SIZES = {"lr": 2.0**-7, "weight_decay": 0.125}
FAMILY: dict[str, Callable[..., Any]] = {
    "lion": pycomm.DistributedLion,
    "lion-mean": lambda *a, **o: pycomm.DistributedLion(*a, result="mean", **o),
    "one-bit": lambda *a, **o: pycomm.OneBitAdam(*a, **{"warmup": 2, **o}),
    "zero-one": lambda *a, **o: pycomm.ZeroOneAdam(*a, **{"freeze": 3, "variance_steps": 1, **o}),
    "demo": pycomm.DeMo,
    "shared-mask": lambda *a, **o: pycomm.SharedMaskAdamW(*a, **{"warmup": 2, **o}),
}
every = pytest.mark.parametrize("which", FAMILY)


def make(which: str, net: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """Return a model in DDP and its optimizer. A model of one's own starts as it is."""
    model = DistributedDataParallel(net or Chosen(), bucket_cap_mb=0.005, **CALM)
    if net is None:
        with torch.no_grad():
            for i, parameter in enumerate(model.module.parameters()):
                parameter.add_(0.01 * (i + 1))
    return model, FAMILY[which](model.parameters(), model=model, **{**SIZES, **options})


def kept(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all that an optimizer keeps on this rank, by name."""
    found = {
        f"{i}.{key}": value
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    state = optimizer.compression.state_dict()
    for kind in ("rank", "own"):
        for name, entry in state.get(f"{kind}{dist.get_rank()}", (0, {}))[1].items():
            tensors = entry.items() if isinstance(entry, dict) else [("own", entry)]
            found |= {f"{name}.{role}": t for role, t in tensors if isinstance(t, torch.Tensor)}
    return found


def assert_alike(one: Any, two: Any) -> None:
    a, b = kept(one), kept(two)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def trained(rank: int, size: int, which: str) -> list[torch.Tensor]:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(5))
    assert len(optimizer.state) in (0, len(SHAPES))
    return values(model)


def all_trained(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    return {which: trained(rank, size, which) for which in FAMILY}


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_bits_on_any_backend(pool, ranks):
    # The sum of more than two numbers depends on the order in which a backend adds them.
    backends = ["pycomm", "gloo"] if ranks == 2 or FULL else ["pycomm"]
    native, *others = (pool.run(all_trained, ranks=ranks, backend=b) for b in backends)
    for which in FAMILY:
        for results in (native, *others):
            assert all(equal(result[which], results[0][which]) for result in results), which
        if ranks == 2:
            assert equal(native[0][which], others[0][0][which]), which


def not_finite(rank: int, size: int, which: str, scaled: bool, what: float) -> None:
    (a, one) = make(which)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    (b, two) = make(which, scaler=scaler if scaled else None)
    for step in range(7):
        bad = step in (1, 5)
        if not bad:
            train(a, one, rank, range(step, step + 1))
        two.zero_grad()
        given = gradients(rank, step)
        if bad and rank == size - 1:
            given["big" if step == 1 else "bias"].view(-1)[7] = what  # of two buckets
        loss = b(given)
        if scaled:
            scaler.scale(loss).backward()
            if step == 5:
                scaler.unscale_(two)
            scaler.step(two)
            scaler.update()
        else:
            loss.backward()
            two.step()
    assert scaler.get_scale() == (256 if scaled else 1024)
    assert equal(values(a), values(b))
    assert_alike(one, two)


OVERFLOWS = pairs(list(FAMILY), [False, True], [float("inf"), float("nan")])


def all_not_finite(rank: int, size: int, which: str) -> None:
    for name, scaled, what in OVERFLOWS:
        if name == which:
            not_finite(rank, size, which, scaled, what)


@every
def test_a_step_that_overflows_leaves_no_trace(pool, which):
    pool.run(all_not_finite, which)


def without_scaler(rank: int, size: int) -> str:
    model, optimizer = make("lion")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(gradients(rank, 0))).backward()
    try:
        scaler.step(optimizer)
    except Error as error:
        return str(error)
    return ""


def test_an_unknown_scaler_is_an_error(pool):
    assert all("scaler=" in text for text in pool.run(without_scaler))


def accumulates(rank: int, size: int, which: str) -> None:
    (a, one), (b, two) = make(which), make(which)
    for step in range(4):
        first, second = gradients(rank, step), gradients(rank, step + 100)
        for optimizer in (one, two):
            optimizer.zero_grad()
        a({name: first[name] + second[name] for name in first}).backward()
        if step % 2:
            with b.no_sync():
                b(first).backward()
        else:
            b(first).backward()
        b(second).backward()
        for optimizer in (one, two):
            optimizer.step()
        two.zero_grad()
        b(gradients(rank, step + 200)).backward()  # and is thrown away
    assert equal(values(a), values(b))
    assert_alike(one, two)


@every
def test_gradients_add_up_until_a_step_uses_them(pool, which):
    pool.run(accumulates, which)


def some_gradients(rank: int, size: int, which: str) -> list[torch.Tensor]:
    """A parameter that no rank uses at first, and one that only one rank uses."""
    model, optimizer = make(which)
    before = dict(zip(SHAPES, values(model), strict=True))
    for step in range(6):
        given = gradients(rank, step)
        if step < 3:
            del given["small"]
        if rank == 1:
            del given["big"]
        optimizer.zero_grad()
        model(given).backward()
        optimizer.step()
        now = dict(zip(SHAPES, values(model), strict=True))
        assert torch.equal(now["small"], before["small"]) == (step < 3)
        assert not torch.equal(now["big"], before["big"])
    # One that joins late moves as far as learning rates allow, not by a second moment of zero.
    assert float((now["small"] - before["small"]).abs().max()) < 0.2
    return values(model)


@every
def test_parameters_that_get_no_gradient(pool, which):
    first, second = pool.run(some_gradients, which)
    assert equal(first, second)


def resumes(rank: int, size: int, which: str) -> None:
    (a, one) = make(which)
    train(a, one, rank, range(4))
    saved = deepcopy((one.state_dict(), one.compression.state_dict(), a.state_dict()))
    train(a, one, rank, range(4, 7))
    (b, two) = make(which)
    two.load_state_dict(saved[0])
    two.compression.load_state_dict(saved[1])
    b.load_state_dict(saved[2])
    train(b, two, rank, range(4, 7))
    assert equal(values(a), values(b))
    assert_alike(one, two)


@every
def test_a_checkpoint_goes_on_with_the_same_bits(pool, which):
    pool.run(resumes, which)


def saves(rank: int, size: int, which: str) -> Any:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(3))
    return optimizer.state_dict(), optimizer.compression.state_dict()


def loads(rank: int, size: int, which: str, states: list[Any]) -> Any:
    model, optimizer = make(which)
    optimizer.load_state_dict(deepcopy(states[0][0]))  # the ranks' processes share its tensors
    optimizer.compression.load_state_dict(*(state for _, state in states))
    loaded = kept(optimizer)
    train(model, optimizer, rank, range(3, 5))
    return values(model), loaded


@every
def test_a_checkpoint_goes_on_with_more_ranks(pool, which):
    results = pool.run(loads, which, pool.run(saves, which, ranks=2), ranks=3)
    assert all(equal(result, results[0][0]) for result, _ in results)


def test_other_ranks_go_on_from_the_mean_momentum(pool):
    states = pool.run(saves, "lion", ranks=2)
    for _, loaded in pool.run(loads, "lion", states, ranks=3):
        for name in SHAPES:
            both = [state[f"own{r}"][1][name] for r, (_, state) in enumerate(states)]
            # One rounding.
            torch.testing.assert_close(loaded[f"{name}.own"], sum(both) / 2, rtol=1e-6, atol=1e-7)


def adopts(rank: int, size: int, which: str) -> list[torch.Tensor]:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(4))
    before = kept(optimizer)
    group = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if group is None:
        return []
    smaller = DistributedDataParallel(model.module, process_group=group, **CALM)
    adopted = FAMILY[which](smaller.parameters(), model=smaller, **SIZES)
    adopted.adopt_state(optimizer)
    now = kept(adopted)
    assert before.keys() == now.keys()
    common = [name for name in before if "owner" not in name and "worker" not in name]
    assert all(torch.equal(before[name], now[name]) for name in common)
    train(smaller, adopted, rank, range(4, 6))
    return values(smaller)


@every
def test_remaining_ranks_adopt_the_state(pool, which):
    first, lost, other = pool.run(adopts, which, ranks=3)
    assert lost == []
    assert equal(first, other)


def other_members(rank: int, size: int) -> str:
    model, optimizer = make("lion")
    train(model, optimizer, rank, range(1))
    optimizer.compression._formed = lambda: 1  # as after pycomm.elastic.reconfigure
    try:
        train(model, optimizer, rank, range(1, 2))
    except Error as error:
        return str(error)
    return ""


def test_other_members_of_the_same_group_are_refused(pool):
    assert all("adopt_state" in text for text in pool.run(other_members))


def in_16_bits(rank: int, size: int, which: str) -> list[torch.Tensor]:
    model, optimizer = make(which, Chosen().to(torch.bfloat16))
    for step in range(4):
        optimizer.zero_grad()
        model({n: g.to(torch.bfloat16) for n, g in gradients(rank, step).items()}).backward()
        optimizer.step()
    return values(model)


@every
def test_parameters_of_16_bits(pool, which):
    first, second = pool.run(in_16_bits, which)
    assert equal(first, second)
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in first)
    assert float(first[0].abs().max()) > SIZES["lr"]


# ---------------------------------------------------------------- what is refused


class Sharded(nn.Module):
    """A model in fully_shard."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        torch.distributed.fsdp.fully_shard(self.net)


def refused(rank: int, size: int, which: str) -> dict[str, str]:
    def attempt(model: nn.Module | None = None, **options: Any) -> str:
        own = model if model is not None else DistributedDataParallel(Chosen())
        try:
            FAMILY[which](**{"params": own.parameters(), "model": own, **options})
        except (Error, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    ddp = DistributedDataParallel(Chosen())
    compressed = DistributedDataParallel(Chosen())
    pycomm.compress(compressed, "int8")
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=True)))
    found = {
        "lr": attempt(lr=-1.0),
        "nan": attempt(weight_decay=float("nan")),
        "group": attempt(params=[{"params": [*ddp.parameters()], "lr": -1.0}], model=ddp),
        "sparse": attempt(sparse),
        "bare": attempt(nn.Linear(4, 4)),
        "sharded": attempt(Sharded()),
        "foreign": attempt(params=nn.Linear(4, 4).parameters()),
        "hook": attempt(compressed),
    }
    if which == "demo":
        found["betas"] = attempt(beta=1.0)
        found["largest"] = attempt(largest=0)
        found["values"] = attempt(values="int3")
    else:
        found["betas"] = attempt(betas=(0.9, 1.0))
        found["one beta"] = attempt(betas=(0.9,))
    if which in ("one-bit", "zero-one"):
        found["unbiased"] = attempt(codec="eden:bits=1")
        found["factors"] = attempt(codec="powersgd:4")
        found["auto"] = attempt(codec="auto")
        found["feedback"] = attempt(feedback="decay")
    if which in ("one-bit", "shared-mask"):
        found["warmup"] = attempt(warmup=0)
    if which == "shared-mask":
        found["density"] = attempt(density=0.0)
        found["of a few"] = attempt(values="topk:0.01")
        found["coarse"] = attempt(values="sign")
        found["no codec"] = attempt(values=8)
    if which == "zero-one":
        found["freeze"] = attempt(freeze=0)
    if which == "lion":
        found["result"] = attempt(result="median")
    return found


@every
def test_what_cannot_work_is_refused(pool, which):
    words = {
        "lr": "ValueError",
        "nan": "weight_decay=nan",
        "group": "lr=-1.0",
        "sparse": "sparse gradients",
        "bare": "TypeError",
        "sharded": "CodedAdamW",
        "foreign": "does not belong",
        "hook": "communication hook",
        "betas": "beta",
        "one beta": "two numbers",
        "largest": "largest=0",
        "values": "int3",
        "unbiased": "unbiased",
        "factors": "factors",
        "auto": "name a codec",
        "feedback": "kind residual",
        "warmup": "warmup=0",
        "freeze": "freeze=0",
        "density": "density=0.0",
        "of a few": "no feedback",
        "coarse": "no feedback",
        "no codec": "TypeError",
        "result": "result='median'",
    }
    for found in pool.run(refused, which):
        for what, text in found.items():
            assert words[what] in text, (what, text)


def differ(rank: int, size: int) -> list[str]:
    found = []
    for which, what in DIFFERENT:
        try:
            make(which, **{key: value[rank] for key, value in what.items()})
        except WireMismatch as error:
            found.append(str(error))
        else:
            found.append("")
    return found


DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("lion", {"lr": (0.1, 0.2)}),
    ("lion", {"result": ("mean", "majority")}),
    ("lion", {"scaler": (None, torch.amp.GradScaler("cpu"))}),
    ("one-bit", {"warmup": (1, 2)}),
    ("one-bit", {"codec": ("sign", "int4")}),
    ("one-bit", {"seed": (1, 2)}),
    ("zero-one", {"freeze": (1, 2)}),
    ("zero-one", {"variance_steps": (1, 2)}),
    ("zero-one", {"local_steps": (1, 2)}),
    ("zero-one", {"most_local": (1, 2)}),
    ("shared-mask", {"density": (0.25, 0.5)}),
    ("shared-mask", {"values": ("int8", "bf16")}),
    ("shared-mask", {"warmup": (1, 2)}),
    ("demo", {"beta": (0.5, 0.25)}),
    ("demo", {"largest": (1, 2)}),
    ("demo", {"chunk": (8, 16)}),
    ("demo", {"values": ("int8", "float32")}),
]


def test_ranks_that_differ_get_an_error_each(pool):
    for texts in pool.run(differ):
        for (which, what), text in zip(DIFFERENT, texts, strict=True):
            assert "rank" in text, (which, what)


def joins(rank: int, size: int) -> str:
    model, optimizer = make("lion")
    try:
        with Join([model]):
            for step in range(1 + rank):
                train(model, optimizer, rank, range(step, step + 1))
    except Error as error:
        return str(error)
    return ""


def test_join_is_refused(pool):
    assert "equally many batches" in pool.run(joins, timeout=60)[0]
