"""Feedback as state: the events of a training run lose no residual and leave none behind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.hooks.ddp import SavedBuckets
from pycomm.reduction.taken import _holds
from tests.extent import each_value, pairs
from tests.torch.harness import (
    CODED,
    SHAPES,
    Chosen,
    alike,
    all_equal,
    compressed,
    equal,
    gradients,
    mean,
    near_zero,
    owed,
    reduced,
    residuals_of,
    resumed,
    values,
    whole,
)
from tests.torch.pool import on_ranks

RULES = [
    "residual",
    "residual:storage=int8",
    "decay:0.8,storage=int8",
    "momentum:0.9",
]
# Without rebuilt buckets after the first step.
CALM = {"find_unused_parameters": True}


# ---------------------------------------------------------------- codecs without residuals


@on_ranks(2)
@pytest.mark.parametrize(
    ("codec", "owes", "expects"),
    [
        # Ranks may drop what is paid in different steps: the backend expects it from all of them.
        ("int4 3:eden:bits=2", [True, True] + [False] * 3, [True] * 5),
        # What is loaded may be the residual of few ranks.
        ("eden:bits=2", [False] * 5, [False] * 4 + [True]),
    ],
)
def test_an_unbiased_codec_pays_and_owes_nothing(rank, size, codec, owes, expects):
    """After each step, whether there is a residual, and whether the backend expects one."""
    model, state = compressed(codec, "residual")
    found, expected = [], []
    for step in range(5):
        if step == 4:
            state.load_state_dict(state.state_dict())
        reduced(model, gradients(rank, step))
        expected.append(any(b.native.owner_residuals for b in state.reducer.buckets.values()))
        state.settle()
        found.append("big" in state.residuals)
    assert (found, expected) == (owes, expects)


# --------------------------------------------------------------------------- overflow


def check_overflow(
    rank: int, size: int, spec: str, feedback: str, when: int, bad: float, where: str
) -> None:
    model, state = compressed(spec, feedback)
    calm, calm_state = compressed(spec, feedback)
    for step in range(when):
        reduced(model, gradients(rank, step))
        reduced(calm, gradients(rank, step))
    before = residuals_of(state.state_dict())
    given = gradients(rank, 90)
    if rank == size - 1:
        given[where].view(-1)[17] = bad
    got = reduced(model, given)
    assert not got[where].isfinite().all()
    verdict = torch.tensor([0.0 if g.isfinite().all() else 1.0 for g in got.values()])
    assert alike(verdict)  # a loss scaler skips on all ranks or on none
    after = residuals_of(state.state_dict())
    assert state.overflows == 1
    if before:
        assert equal(before, after)
    else:  # the step has made them, and they are zero
        assert not any(t.any() for roles in after.values() for t in roles.values())
    for step in (91, 92):  # both are in the same buckets by now
        got, want = reduced(model, gradients(rank, step)), reduced(calm, gradients(rank, step))
    if when > 2:
        assert equal(got, want)
    assert calm_state.overflows == 0


@on_ranks(2)
@pytest.mark.parametrize("feedback", RULES)
def test_an_overflow_leaves_no_trace(rank, size, feedback):
    # In step 1 DDP rebuilds its buckets, so other ranks own the values from there on.
    for when in (0, 1, 3):
        check_overflow(rank, size, "int4", feedback, when, math.inf, "small")


@on_ranks(2)
@pytest.mark.parametrize("spec", ["int4", "multiples"])
def test_an_overflow_of_any_parameter_leaves_no_trace(rank, size, spec):
    for where, bad in (("big", math.nan), ("small", math.inf), ("bias", math.nan)):
        check_overflow(rank, size, spec, "residual", 3, bad, where)


@on_ranks(1)
@pytest.mark.parametrize("momentum", [False, True])
def test_residuals_are_rescaled_with_momentum_if_asked(rank, size, momentum):
    _, state = compressed("int4", "momentum:0.9")
    residual = state.residuals.get("big", 4, torch.device("cpu"))
    for pair in (residual.worker, residual.momentum):
        pair[0].copy_(torch.arange(4.0))
    state.rescale(0.5, ["module.big"], momentum=momentum)
    assert residual.current("worker").tolist() == [0, 0.5, 1, 1.5]
    assert residual.current("momentum").tolist() == ([0, 0.5, 1, 1.5] if momentum else [0, 1, 2, 3])


@on_ranks(2)
def test_overflows_of_float64_gradients_are_counted(rank, size):
    model = DistributedDataParallel(Chosen().double())
    state = pycomm.compress(model, "int8")
    for step, bad in enumerate([False, True, False]):
        given = {name: g.double() for name, g in gradients(rank, step).items()}
        if bad and rank == size - 1:
            given["small"].view(-1)[17] = float("inf")
        got = reduced(model, given)
        assert got["small"].isfinite().all() == (not bad)
    state.settle()
    assert state.overflows == 1


# ------------------------------------------------------------- events of training runs


@on_ranks(2)
@pytest.mark.parametrize("feedback", ["residual", "decay:0.8,storage=int8"])
def test_an_unused_parameter_keeps_what_it_owes(rank, size, feedback):
    model, state = compressed("int4", feedback, **CALM)
    for step in range(3):
        reduced(model, gradients(rank, step))
    before = owed(state)
    for step in (3, 4):
        reduced(model, gradients(rank, step, ["big", "bias"]))
    after = owed(state)
    assert torch.equal(before["small"], after["small"])
    assert not torch.equal(before["big"], after["big"])
    # One rank uses the parameter: the others send their residuals.
    reduced(model, gradients(rank, 5, SHAPES if rank == 0 else ["big", "bias"]))
    assert not torch.equal(owed(state)["small"], before["small"])


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_an_unused_parameter_whose_gradient_is_zeros_loses_nothing(rank, size, views):
    """Where gradients are views of buckets, it gets the result although no rank has used it."""
    model, state = compressed("int4", gradient_as_bucket_view=views, **CALM)
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(8):
        given = gradients(rank, step, ["big", "bias"] if 3 <= step < 6 else None)
        model.zero_grad(set_to_none=False)
        model(given).backward()
        for name, parameter in model.module.named_parameters():
            if name in given:
                missing[name] += mean(size, step, given)[name]
            missing[name] -= parameter.grad
    near_zero(*(missing[name] - debt for name, debt in owed(state).items()))


@on_ranks(2)
@pytest.mark.parametrize("feedback", ["residual", "momentum", "decay:0.8,storage=int8"])
def test_a_frozen_parameter_keeps_its_residual(rank, size, feedback):
    model, state = compressed("int4", feedback, **CALM)
    missing = torch.zeros(SHAPES["small"])
    for step in range(8):
        frozen = step in (3, 4)
        model.module.small.requires_grad_(not frozen)
        before = owed(state)["small"]
        got = reduced(model, gradients(rank, step))
        if frozen:
            assert torch.equal(owed(state)["small"], before)
        else:
            missing += mean(size, step)["small"] - got["small"]
    if feedback == "residual":
        near_zero(missing - owed(state)["small"])


# ------------------------------------------------------- checkpoints, other world sizes

STEPS = 3  # DDP rebuilds its buckets after the first


@pytest.mark.parametrize("feedback", ["residual", "residual:storage=int8", "momentum"])
def test_other_numbers_of_ranks_owe_the_same(pool, tmp_path, feedback):
    before = None
    for i, ranks in enumerate((2, 3, 1)):
        steps, make = range(i * STEPS, (i + 1) * STEPS), partial(compressed, "int4", feedback)
        began, missing, ended = pool.run(resumed, tmp_path, steps, make, ranks=ranks)[0]
        for name in CODED if before else ():
            # Float32 round-off of values around 1; 8 bits of the largest of 32 values.
            atol = 1e-2 if "storage" in feedback else 1e-5
            near_zero(began[name] - before[name], atol=atol)
            if feedback == "residual":  # the loss is in the residuals
                near_zero(missing[name] - (ended[name] - began[name]))
        before = ended
    if feedback == "residual":  # a single rank applies all of them
        assert not any(t.any() for t in before.values())


@on_ranks(2)
@pytest.mark.parametrize("codec", ["topk:0.01 warmup=1", "int8 3:topk:0.01"])
def test_what_a_schedule_has_kept_is_loaded_as_it_was(rank, size, codec):
    """Also into a state that is yet to begin, for whose first codec int8 would do."""
    shapes = {"weight": (256, 256)}
    model, again = (DistributedDataParallel(Chosen(shapes)) for _ in range(2))
    state, loaded = (pycomm.compress(one, codec) for one in (model, again))
    for step in range(3):
        reduced(model, gradients(rank, step, shapes=shapes))
    loaded.load_state_dict(state.state_dict())
    assert equal(*(residuals_of(one.state_dict()) for one in (state, loaded)))


@on_ranks(2)
def test_a_step_before_the_first_coded_one_is_loaded(rank, size):
    """As after a divergence: in a warm-up parameters have momentum, and no errors yet."""
    (model, state), (again, fresh) = (compressed("topk:0.1 warmup=1", "momentum") for _ in "ab")
    reduced(model, gradients(rank, 0))
    saved = state.state_dict()
    for step in range(1, 4):
        reduced(model, gradients(rank, step))
    for one in (state, fresh):
        one.load_state_dict(saved)
    for step in range(1, 4):
        assert equal(*(reduced(one, gradients(rank, step)) for one in (model, again)))


# ------------------------------------------------------------------------------------- resumed runs
# A run that wraps, compresses, loads and trains goes on with the bits of the saved run.


KINDS = ["residual", "decay:0.8", "momentum:0.9"]
STORAGES = ["float32", "int8"]
FEEDBACKS = [f"{k}{',' if ':' in k else ':'}storage={s}" for k in KINDS for s in STORAGES]
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp in one bucket": {"bucket_cap_mb": 25},
    "ddp with views": {"gradient_as_bucket_view": True},
    "ddp of a static graph": {"static_graph": True},
    "ddp with unused": {"find_unused_parameters": True},
}
SHARDS = ["fsdp2", "hsdp"]
WIDTH, SAVED, END = 64, 3, 6


class Net(nn.Module):
    """Its parameters get their gradients in another order than DDP's first buckets have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(128, WIDTH)
        self.norm = nn.LayerNorm(128)
        self.first = nn.Linear(WIDTH, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """Return the model in DDP, whose buckets have few parameters, or in shards."""
    if kind in WRAPPERS:  # the order of buckets differs before and after DDP's first step
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.02} | WRAPPERS[kind])
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


Maker = Callable[[nn.Module], "tuple[Any, Any]"]
"""Makes the optimizer and the state of a wrapped model."""


def by_codec(model: nn.Module, codec: str, feedback: str | bool = True) -> tuple[Any, Any]:
    state = pycomm.compress(model, codec, feedback=feedback)
    return torch.optim.AdamW(model.parameters(), 1e-3), state


def coded(model: nn.Module, make: Any, lr: float) -> tuple[Any, Any]:
    optimizer = make(model.parameters(), lr=lr, model=model)
    return optimizer, optimizer.compression


INT4: Maker = partial(by_codec, codec="int4")
ADAMW: Maker = partial(coded, make=pycomm.CodedAdamW, lr=1e-3)
SGD: Maker = partial(coded, make=pycomm.CodedSGD, lr=1e-2)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def fresh(make: Maker, wrapper: str) -> tuple[Any, Any, Any]:
    model = wrapped(wrapper, Net())
    return model, *make(model)


def resume(rank: int, make: Maker, wrapper: str) -> int:
    """Resume a run in the natural order, compare it; return the number of saved buckets."""
    parts = fresh(make, wrapper)
    train(parts[0], parts[1], rank, range(SAVED))
    saved = copy.deepcopy([part.state_dict() for part in parts])
    train(parts[0], parts[1], rank, range(SAVED, END))
    want, norms = values(parts[0]), parts[2].residual_norms()
    for again in (fresh(make, wrapper), parts):  # also one that has advanced
        for part, state in zip(again, copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)
        train(again[0], again[1], rank, range(SAVED, END))
        assert equal(values(again[0]), want), wrapper
        assert again[2].residual_norms() == norms
    return len(saved[2]["about"][0].get("buckets", ()))


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_each_feedback_resumes_with_the_same_bits(rank, size, codec):
    for feedback in FEEDBACKS:
        assert resume(rank, partial(by_codec, codec=codec, feedback=feedback), "ddp") == 2


@on_ranks(3)
def test_each_wrapper_and_optimizer_resumes_with_the_same_bits(rank, size):
    for wrapper in WRAPPERS:
        for make in (INT4, ADAMW, SGD):
            resume(rank, make, wrapper)


@on_ranks(4)
@pytest.mark.parametrize("wrapper", SHARDS)
def test_shards_resume_with_the_same_bits(rank, size, wrapper):
    for make in (partial(by_codec, codec="int4:rounding=stochastic"), ADAMW, SGD):
        resume(rank, make, wrapper)


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_each_codec_resumes_with_the_same_bits_also_on_gloo(rank, size):
    for codec in ("topk:0.1", "sign", "nvfp4", "eden:bits=2,size=128"):
        resume(rank, partial(by_codec, codec=codec), "ddp")
    for codec in ("quant:bits=4,block=64,rounding=stochastic", "multiples:unit=0.5"):
        resume(rank, partial(by_codec, codec=codec), "ddp with unused")


@on_ranks(2)
def test_buckets_of_another_model_are_not_used(rank, size):
    """Buckets that are not those of the checkpoint are reduced, and the state goes on."""
    model, optimizer, state = fresh(INT4, "ddp")
    train(model, optimizer, rank, range(SAVED))
    saved = copy.deepcopy(state.state_dict())
    saved["about"][0]["buckets"][0].append("gone.weight")
    again, other, loaded = fresh(INT4, "ddp")
    loaded.load_state_dict(saved)
    train(again, other, rank, range(3))
    assert loaded.step == state.step + 3


def test_a_failure_of_a_saved_bucket_is_raised():
    """The futures of earlier buckets are then given up with the backward."""

    def reduce(tensor: torch.Tensor, names: tuple[str, ...]) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(pycomm.Error("rank 0: gone"))
        return future

    buckets = SavedBuckets(
        [("a", "b")], {"a": 2, "b": 3}.__getitem__, reduce, lambda future: future.wait()
    )
    assert not buckets.reduce(torch.ones(3), ("b",), last=False).done()
    with pytest.raises(pycomm.Error, match="gone"):
        buckets.reduce(torch.ones(2), ("a",), last=True)


# ------------------------------------------------------------------------------ discarded gradients
# Gradients that are reduced but never used leave nothing in the residuals. A GAN's generator step
# makes gradients of the discriminator that the next `zero_grad` removes.


TURNS = 12  # twice the period of what the loops below do


def chosen(kind: str, spec: str = "int4", **options: Any) -> tuple[nn.Module, Any]:
    model = wrapped(kind, Chosen())
    return model, pycomm.compress(model, spec, **options)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def junk(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return gradients that are ten times larger, as those of another loss may be."""
    return {name: 10 * g for name, g in gradients(rank, 1000 + step).items()}


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "backend", "how"),
    [
        *((kind, "pycomm", "") for kind in (*WRAPPERS, *SHARDS)),
        *((kind, "gloo", "") for kind in ("ddp", "fsdp2")),
        # Optimizers that leave version counters alone.
        *(("ddp", "pycomm", how) for how in ("fused", "foreach")),
        ("fsdp2", "pycomm", "foreach"),
    ],
)
def test_the_order_of_the_gan_tutorial(rank, size, kind, how):
    """Results with and without the backward that is for another model have the same bits."""
    for none in (True, False):
        check_tutorial(kind, rank, none, {how: True} if how else {})


def check_tutorial(kind: str, rank: int, none: bool, how: dict[str, Any]) -> None:
    (model, state), (calm, calm_state) = chosen(kind), chosen(kind)
    optimizer, calm_optimizer = (torch.optim.SGD(m.parameters(), 0.1, **how) for m in (model, calm))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    for step in range(TURNS):
        optimizer.zero_grad(set_to_none=none)
        calm_optimizer.zero_grad(set_to_none=none)
        model(gradients(rank, step)).backward()
        calm(gradients(rank, step)).backward()
        assert equal(grads(model), grads(calm)), step
        if step % 5 == 3:
            state.residual_norms()  # reading has no side effect
        optimizer.step()
        calm_optimizer.step()
        # A static graph rebuilds its buckets after its second backward, which changes the owners.
        begun = step > 2 or kind != "ddp of a static graph"
        for _ in range(1 + step % 2):
            if begun and step % 3 < 2:
                model(junk(rank, step)).backward()
            if step % 2:
                optimizer.zero_grad(set_to_none=none)
        other.step()
    calm_optimizer.zero_grad()
    assert equal(*(residuals_of(s.state_dict()) for s in (state, calm_state)))
    assert all(worker > 0 for worker, _ in state.residual_norms().values())


def sgd(model: nn.Module) -> Callable[[], None]:
    return torch.optim.SGD(model.parameters(), 0.1).step


def by_hand(model: nn.Module) -> Callable[[], None]:
    def step() -> None:
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    return step


@on_ranks(2)
@each_value
@pytest.mark.parametrize(
    ("kind", "update", "synced"),
    pairs([*WRAPPERS, "fsdp2"], [sgd, by_hand], [False, True]),
)
def test_gradients_that_add_up_are_not_thrown_away(rank, size, kind, update, synced):
    """Gradients of two backwards add up and are then used: sent and residual values all count."""
    model, state = chosen(kind)
    # torch.compile's own cuts need a first bucket of 1 MiB.
    run = torch.compile(model, backend="eager") if kind == "ddp in one bucket" else model
    update = update(model)
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(TURNS):
        model.zero_grad(set_to_none=step % 2 == 0)
        for part in (0, 1):
            if kind == "fsdp2":
                model.set_requires_gradient_sync(synced or part == 1)
                model(gradients(rank, 2 * step + part)).backward()
            elif part == 0 and not synced and step > 0:  # a static graph is learnt from the first
                with model.no_sync():
                    run(gradients(rank, 2 * step)).backward()
            else:
                run(gradients(rank, 2 * step + part)).backward()
        update()
        for name, p in getattr(model, "module", model).named_parameters():
            both = (mean(size, 2 * step + part)[name] for part in (0, 1))
            missing[name] += sum(both) - whole(p.grad)
    model.zero_grad()
    debts = owed(state)
    assert all(debts[name].any() for name in CODED)
    near_zero(*(missing[name] - debts[name] for name in SHAPES), atol=1e-4)


DISCARDED = [("residual", "int4"), ("momentum", "topk:0.1")]


@on_ranks(2)
@each_value
@pytest.mark.parametrize(
    ("kind", "feedback", "spec"),
    [(kind, *how) for kind in ("ddp", "fsdp2") for how in DISCARDED],
)
def test_discard(rank, size, kind, feedback, spec):
    """If it is unknown which code moves the parameters, or when, the user can call discard()."""
    (model, state), (calm, _) = (chosen(kind, spec, feedback=feedback) for _ in range(2))
    state.discard()  # nothing to discard yet
    for step in range(8):
        for m in (model, calm):
            m.zero_grad()
            m(gradients(rank, step)).backward()
        assert equal(grads(model), grads(calm)), step
        by_hand(model)()
        model.zero_grad()
        if step % 2:
            model(junk(rank, step)).backward()
            state.discard()
            by_hand(model)()  # moves the parameters in any way


# ---------------------------------------------------------------------------------- taken gradients
# Gradients that somebody takes are never believed to be thrown away, whatever shows of it.
#
# Each test compares all that has arrived, and all that is owed in the end, with all gradients.


SIDE = 64


def given(rank: int, step: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * number + rank)
    return torch.randn(SIDE, SIDE, generator=generator)


def all_ranks(total: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total)
    return total / dist.get_world_size()


@on_ranks(2)
@each_value
@pytest.mark.parametrize("used", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_of_zeros_say_nothing_about_others(rank, size, kind, used):
    """Gradients add up over two backwards; most of them are zero."""
    shapes = {f"expert{i}": (SIDE, SIDE) for i in range(8)}
    module = Chosen(shapes)
    model: Any = DistributedDataParallel(module) if kind == "ddp" else fully_shard(module)
    state = pycomm.compress(model, "int4")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    got, want = ([torch.zeros(SIDE, SIDE) for _ in range(used)] for _ in range(2))
    for step in range(6):
        optimizer.zero_grad()
        for part in (0, 1):
            parts = [given(rank, 2 * step + part, i) for i in range(used)]
            zeros = [torch.zeros(SIDE, SIDE)] * (len(shapes) - used)
            model(dict(zip(shapes, [*parts, *zeros], strict=True))).backward()
            want = [total + part for total, part in zip(want, parts, strict=True)]
        for total, parameter in zip(got, module.parameters(), strict=False):
            total += whole(parameter.grad)
        optimizer.step()
    optimizer.zero_grad()
    debts = owed(state, dict(list(shapes.items())[:used])).values()
    for arrived, debt, total in zip(got, debts, want, strict=True):  # of values around 10
        near_zero(arrived + debt - all_ranks(total), atol=1e-4)


@on_ranks(2, then=all_equal)
@each_value
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("feedback", ["residual", "decay"])
def test_join_stands_in_for_a_rank_without_data(rank, size, feedback, unused):
    """Where a rank has no more data, nobody steps: the others take what it helps to reduce."""
    module = Chosen({"weight": (SIDE, SIDE), "other": (SIDE, SIDE)})
    model = DistributedDataParallel(module, find_unused_parameters=unused)
    state = pycomm.compress(model, "int4", feedback=feedback)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    got, want = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    for epoch in range(2):
        with Join([model]):
            for step in range(3 + 6 * (rank == 0)):
                gradient = given(rank, 20 * epoch + step)
                other = {} if unused and step % 2 else {"other": gradient}
                model({"weight": gradient} | other).backward()
                want += gradient
                got += module.weight.grad
                optimizer.step()
                optimizer.zero_grad()
    if feedback == "residual":
        dist.broadcast(got, 0)  # of the rank that took them all
        debt = owed(state, {"weight": (SIDE, SIDE)})["weight"]
        near_zero(got + debt - all_ranks(want), atol=1e-4)
    return module.weight.detach()


@on_ranks(2)
def test_parameters_that_loading_replaces(rank, size):
    """FSDP2 takes what `load_state_dict(assign=True)` has put in its parameters' places."""

    def train(replaces: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(SIDE, SIDE, bias=False))
        pycomm.compress(model, "int4")
        found = []
        for step in range(8):
            if step in (0, 3) and (replaces or step == 0):
                saved = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
                model.load_state_dict(saved, assign=True)
                optimizer = torch.optim.SGD(model.parameters(), 0.1 * 0.5**step)
            (model(torch.eye(SIDE)) * given(rank, step)).sum().backward()
            found.append(whole(model.weight.grad).clone())
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert equal(train(True), train(False))


@on_ranks(2)
def test_an_optimizer_in_backward_takes_gradients(rank, size):
    """Also where something else has moved the parameters between two steps, such as an average."""
    found = []
    for moves in (False, True):
        model, state = chosen("fsdp2")
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)

            def take(_: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(take)
        for step in range(6):
            model(gradients(rank, step)).backward()
            with torch.no_grad():
                for parameter in model.parameters() if moves and step == 2 else ():
                    parameter.mul_(1)
        found.append(residuals_of(state.state_dict()))
    assert equal(*found)


def test_one_value_that_is_not_zero_is_found():
    gradient = torch.zeros(1000)
    assert not _holds(gradient)
    for place in range(1000):  # some of them are among those that are looked at first
        gradient[place] = 1
        assert _holds(gradient), place
        gradient[place] = 0
