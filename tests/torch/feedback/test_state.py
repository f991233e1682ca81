"""Feedback as state: the events of a training run lose no residual and leave none behind."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.feedback import Residuals
from tests.torch.harness import (
    CODED,
    SHAPES,
    Chosen,
    alike,
    compressed,
    equal,
    gradients,
    mean,
    near_zero,
    on_both,
    owed,
    reduced,
    residuals_of,
    resumed,
)
from tests.torch.pool import on_ranks

RULES = [
    "residual",
    "residual:storage=bf16",
    "decay:0.8,storage=int8",
    "momentum:0.9",
]
# Without rebuilt buckets after the first step.
CALM = {"find_unused_parameters": True}


# ---------------------------------------------------------------- equal on all backends


@on_both()
@pytest.mark.parametrize("spec", ["int4", "topk:0.1"])
def test_other_backends_leave_the_same_bits(rank, size, spec):
    found = {}
    for feedback in RULES:
        model, state = compressed(spec, feedback)
        got = [g for step in range(4) for g in reduced(model, gradients(rank, step)).values()]
        state.settle()
        pieces = [state.residuals[name] for name in CODED]
        found[feedback] = got + [r.current(role) for r in pieces for role, _ in r.pairs()]
    return found


# ---------------------------------------------------------------- codecs without residuals


def debts(rank: int, size: int, codec: str) -> tuple[list[bool], list[bool]]:
    """Return after each step whether there is a residual, and whether the backend expects one."""
    model, state = compressed(codec, "residual")
    found, expected = [], []
    for step in range(5):
        if step == 4:
            state.load_state_dict(state.state_dict())
        reduced(model, gradients(rank, step))
        expected.append(any(b.native.owner_residuals for b in state.reducer.buckets.values()))
        state.settle()
        assert state.residuals is not None
        found.append("big" in state.residuals)
    return found, expected


def test_an_unbiased_codec_pays_and_owes_nothing(pool):
    """Ranks may drop what is paid in different steps: the backend expects it from all of them."""
    paid = pool.run(debts, "int4 3:eden:bits=2")
    assert paid == [([True, True] + [False] * 3, [True] * 5)] * 2


def test_without_feedback_no_residual_is_expected(pool):
    """What is loaded may be the residual of few ranks."""
    assert pool.run(debts, "eden:bits=2") == [([False] * 5, [False] * 4 + [True])] * 2


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
@pytest.mark.parametrize("spec", ["int4", "multiples", "powersgd:2"])
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
    state.rescale(0.5, ["big"], momentum=momentum)
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
    assert state.residual_ages() == {"big": 0, "small": 2}
    # One rank uses the parameter: the others send their residuals.
    reduced(model, gradients(rank, 5, SHAPES if rank == 0 else ["big", "bias"]))
    assert not torch.equal(owed(state)["small"], before["small"])
    assert state.residual_ages() == {"big": 0, "small": 0}


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
            assert state.residual_ages()["small"] == step - 2
        else:
            missing += mean(size, step)["small"] - got["small"]
    assert not any(state.residual_ages().values())
    if feedback == "residual":
        near_zero(missing - owed(state)["small"])


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, False),
        ({"gradient_as_bucket_view": True}, False),
        ({"static_graph": True}, False),
        ({"bucket_cap_mb": 25}, True),  # torch.compile's own cuts need a first bucket of 1 MiB
    ],
    ids=["plain", "bucket view", "static graph", "compiled"],
)
def test_accumulated_steps_lose_nothing(rank, size, options, compiled):
    model, state = compressed("int4", "residual", **options)
    run = torch.compile(model, backend="eager") if compiled else model
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        model.zero_grad(set_to_none=step % 2 == 0)
        if step > 0:  # two micro-steps; static_graph=True learns from the first, which reduces
            with model.no_sync():
                run(gradients(rank, 10 + step)).backward()
        run(gradients(rank, step)).backward()
        for name, p in model.module.named_parameters():
            missing[name] += mean(size, step)[name] - p.grad
            if step > 0:
                missing[name] += mean(size, 10 + step)[name]
    debts = owed(state)
    near_zero(*(missing[name] - debts[name] for name in CODED))


# ------------------------------------------------------- checkpoints, other world sizes

STEPS = 3  # DDP rebuilds its buckets after the first


@pytest.mark.parametrize(
    "feedback", ["residual", "residual:storage=bf16", "residual:storage=int8", "momentum"]
)
def test_other_numbers_of_ranks_owe_the_same(pool, tmp_path, feedback):
    before = None
    for i, ranks in enumerate((2, 3, 1)):
        steps, make = range(i * STEPS, (i + 1) * STEPS), partial(compressed, "int4", feedback)
        began, missing, ended = pool.run(resumed, tmp_path, steps, make, ranks=ranks)[0]
        for name in CODED if before else ():
            # Float32 round-off of values around 1; 8 bits of bf16, or of the largest of 32 values.
            atol = 1e-2 if "storage" in feedback else 1e-5
            near_zero(began[name] - before[name], atol=atol)
            if feedback == "residual":  # the loss is in the residuals
                near_zero(missing[name] - (ended[name] - began[name]))
        before = ended
    if feedback == "residual":  # a single rank applies all of them
        assert not any(t.any() for t in before.values())


def test_loaded_residuals_leave_nothing_of_other_owners():
    residuals = Residuals(pycomm.Feedback(storage="float32"), ranks=2)
    one = residuals.get("big", 8, torch.device("cpu"))
    one.use("former", 2)
    one.owner[1][:4] = 1  # the values that this rank owned in its last bucket
    one.commit(1)
    saved = residuals.state_dict()
    one.use("former", 2)
    one.owner[0][:4] = 2
    one.commit(2)
    saved["big"]["about"] = (8, 1, "", 1)  # as resharded, for whatever comes
    saved["big"]["owner"] = torch.zeros(8)
    residuals.load_state_dict(saved)
    one.use("another", 2)
    one.owner[one.sides[1]][4:] = 3  # it owns the other half now, and writes nothing else
    one.commit(3)
    assert one.current("owner").tolist() == [0, 0, 0, 0, 3, 3, 3, 3]
