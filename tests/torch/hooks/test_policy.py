"""Plans on several ranks: all decide alike, whatever each measures; policies change at no loss."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import monitor
from pycomm.codecs import codec
from pycomm.policy import Guard, Parameter, Plan, Policy
from tests.extent import each_value, part
from tests.torch.harness import (
    CODED,
    SHAPES,
    Chosen,
    compressed,
    gradients,
    heard,
    lost,
    mean,
    near_zero,
    reduced,
)
from tests.torch.interpreter import launch
from tests.torch.pool import on_ranks
from tests.torch.reduction.test_saved_state import PATIENT, network, train

CPU = torch.device("cpu")


def same_everywhere(value: Any) -> Any:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    assert all(other == everybody[0] for other in everybody), everybody
    return everybody[0]


def specs(plan: Plan) -> dict[str, str]:
    return {name: decision.codec.spec() for name, decision in plan.decisions.items()}


# ------------------------------------------------------------------------- schedules


@on_ranks()
@pytest.mark.parametrize(("backend", "ranks"), [("pycomm", 3), ("gloo", 2)])
def test_a_schedule_loses_nothing(rank, size):
    """After int4, then int8, then exact steps, earlier codecs' residuals have all been applied."""
    model, state = compressed(Policy("int4", schedule=((3, "int8"), (5, "fp32"))))
    missing, seen = [], []
    for step in range(1, 7):
        missing.append(lost(model, rank, [step]))
        seen.append(state.plan.decisions["big"].codec.spec())
    assert seen == [codec(c).spec() for c in ("int4", "int4", "int8", "int8", "fp32", "fp32")]
    assert all(norms == (0, 0) for norms in state.residual_norms().values())
    near_zero(*(sum(each[name] for each in missing) for name in SHAPES))
    assert "from step 5" in state.summary()


@on_ranks(2)
def test_a_rank_that_counts_other_steps_is_named(rank, size):
    model, state = compressed(Policy("int4", schedule=((2, "int8"), (3, "bf16"))))
    reduced(model, gradients(rank, 0))
    state.reducer.step.number += rank
    with pytest.raises(RuntimeError, match=r"rank 0 has 'big .*int8.*rank 1 has .*bf16"):
        reduced(model, gradients(rank, 1))


# ---------------------------------------------------------------------------- auto


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@on_ranks(3)
@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"fp32": 2.0, "int8": 0.6, "int4": 0.4}, "int4"),
        ({"fp32": 0.50, "int8": 0.51, "int4": 0.51}, "fp32"),
        ({"fp32": 0.50, "int8": 0.40, "int4": 0.40}, "int8"),
    ],
)
def test_auto_decides_alike_on_ranks_with_different_clocks(rank, size, seconds, best):
    clock = Clock()
    policy = Policy("auto", candidates=("fp32", "int8", "int4"))
    plan = Plan(policy, dist.group.WORLD, clock=clock)
    for i in range(4):
        plan.add(Parameter(f"w{i}", (100, 100), torch.float32))
    plan.add(Parameter("bias", (100,), torch.float32))
    plan.agree(CPU)
    chosen = []
    for step in range(1, 130):
        plan.advance(step, CPU)
        chosen.append(specs(plan))
        used = next(c for c in seconds if codec(c) == plan.decisions["w0"].codec)
        # Each rank's clock differs, and one of them is delayed now and then.
        stumble = 2.5 if step % size == rank and step % 4 == 0 else 1.0
        clock.now += seconds[used] * (1 + 0.01 * rank) * stumble
    same_everywhere(chosen)
    assert plan.decisions["w0"].codec == codec(best)
    assert plan.decisions["bias"].exact
    assert "auto, by time of a step" in same_everywhere(plan.summary())


# ---------------------------------------------------------------------------- guard


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_bad_codec_is_noticed_warned_about_and_left(rank, size):
    """fp16 has no values below 6e-8, so smaller gradients are lost."""
    with heard(logging.WARNING) as lines:
        policy = Policy("fp16", guard=Guard(every=2, share=1.0))
        model, state = compressed(policy)
        for step in range(9):
            got = reduced(model, gradients(rank, step, scale=1e-9))
    same_everywhere(specs(state.plan))
    assert all(d.codec == codec("fp32") for d in state.decisions.values())
    assert any("fp16 was off" in e for e in state.plan.events)
    want = mean(size, 8, scale=1e-9)
    for name in SHAPES:
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-15)
    # There is one report per cause, although there are two parameters, and on one rank only.
    assert len(lines) == (rank == 0)
    assert all("fp16 is off by" in line for line in lines)


CODECS = ["int8", "int4", "bf16", "topk:0.01", "powersgd:2", "int2", "eden:bits=1"]


@on_ranks()
@pytest.mark.parametrize(
    ("spec", "backend", "ranks"),
    [
        (spec, *on)
        for place, spec in enumerate(CODECS)
        for on in part([("pycomm", 3), ("gloo", 2)], 2, place)
    ],
)
def test_codecs_raise_no_alarm_even_for_noise(rank, size, spec):
    """Gradients have no structure at all, and are independent from rank to rank."""
    model, state = compressed(Policy(spec, guard=Guard(every=1, share=1.0)))
    state.plan._checks._clock = lambda: 0.0  # otherwise a slow machine skips checks
    spreads = []
    for step in range(50):
        reduced(model, gradients(rank, step))
        spreads += [quality.spread for quality in state.plan.qualities.values()]
    found = same_everywhere(sorted(state.plan.qualities.items()))
    assert [name for name, _ in found] == ["big", "small"]
    assert not state.plan.events, state.summary()
    for _, quality in found:
        if spec in CODECS[:3]:  # int4 has an error of 0.12 on normal values, for each encoding
            assert quality.coding < 0.2
            assert quality.cosine > 0.95
            assert quality.residual < 0.3
            assert quality.error < quality.coding + 2 * quality.residual
        elif spec != "eden:bits=1":  # which has no residuals, and an error of 1.2 in two encodings
            assert quality.coding <= 1
    if spec == "eden:bits=1":
        assert 0.5 < sum(spreads) / len(spreads) < 2


class SlowClock(Clock):
    """A clock of which every reading takes a hundredth of a second."""

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@on_ranks(2)
def test_checks_that_cost_too_much_become_rarer(rank, size):
    model, state = compressed(Policy("int8", guard=Guard(every=2)))
    state.plan._clock = state.plan._checks._clock = clock = SlowClock()
    rarer = []
    for step in range(64):
        # Checks are expensive on the last rank only: its steps take a second, the others' ten.
        clock.now += 1.0 if rank == size - 1 else 1.1
        reduced(model, gradients(rank, step))
        rarer.append(state.plan.report().check_every)
    same_everywhere(rarer)
    # A check reads the clock about four times, and may take 0.4 % of the time between two checks.
    assert rarer[0] == 2
    assert 8 <= rarer[-1] <= 32


@on_ranks()
@pytest.mark.parametrize(
    ("backend", "ranks", "scale", "becomes"),
    [
        (*on, *scaled)
        for place, scaled in enumerate([(1.0, "fp16"), (1e-9, "fp32")])
        for on in part([("pycomm", 3), ("gloo", 2)], 2, place)
    ],
)
def test_shards_are_checked_by_those_who_own_them(rank, size, scale, becomes):
    model = fully_shard(Chosen(), mesh=init_device_mesh("cpu", (size,)))
    state = pycomm.compress(model, Policy("fp16", guard=Guard(every=2, share=1.0)))
    measured = []
    for step in range(9):
        model.zero_grad()
        model(gradients(rank, step, scale=scale)).backward()
        measured.append(sorted(state.plan.qualities.items()))
    same_everywhere(measured)
    specs_now = same_everywhere(specs(state.plan))
    assert specs_now["big"] == specs_now["small"] == codec(becomes).spec()
    want = mean(size, 8, scale=scale)
    for name, parameter in model.named_parameters():
        # fp16 has a relative error of 2^-11, and a residual of the same size from the step before.
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=3e-3 * scale)
    if becomes == "fp16":
        assert set(state.plan.qualities) == {"big", "small"}
        assert all(0 < q.coding < 1e-3 for q in state.plan.qualities.values())


@on_ranks(2)
def test_steps_that_overflow_are_not_judged(rank, size):
    model, state = compressed(Policy("int8", guard=Guard(every=1, share=1.0)))
    for step in range(6):
        given = gradients(rank, step)
        if rank == 0:
            given["big"][3, 5] = float("nan")
        reduced(model, given)
    assert not state.plan.qualities
    assert not state.plan.events
    assert state.plan.overflows == 5  # the last one is counted when the next step begins


@on_ranks(2)
def test_escalations_are_part_of_the_checkpoint(rank, size):
    guard = Guard(every=1, share=1.0)
    model, state = compressed(Policy("fp16", guard=guard))
    for step in range(6):
        reduced(model, gradients(rank, step, scale=1e-9))
    assert state.decisions["big"].codec == codec("fp32")
    _, fresh = compressed(Policy("fp16", guard=guard))
    fresh.load_state_dict(state.state_dict())
    fresh.begin_step()
    assert specs(fresh.plan) == specs(state.plan)


# ----------------------------------------------------------------------------------- another policy
# Changing the policy of a compressed model without losing residuals.


@on_ranks(3, **PATIENT)
@each_value
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("then", ["none", "int8"])
def test_what_is_owed_is_sent_with_the_next_step(rank, size, then):
    model, state = compressed("int4", "residual")
    before = lost(model, rank, range(4))
    assert max(float(before[name].abs().max()) for name in CODED) > 1e-2
    state.set_policy(then)
    after = lost(model, rank, [4])
    paid = [before[name] + after[name] for name in SHAPES]
    if then == "int8":
        assert {d.codec.name for n, d in state.decisions.items() if n in CODED} == {"quant"}
        near_zero(*paid, atol=0.1)  # int8's residual
    else:
        near_zero(*paid, atol=2e-5)
        for step in (5, 6):
            near_zero(*lost(model, rank, [step]).values(), atol=1e-6)
        assert not state.residual_norms()


@on_ranks(2, **PATIENT)
@pytest.mark.parametrize("feedback", ["decay:0.5", "residual:storage=int8"])
def test_of_every_kind_of_feedback_nothing_stays(rank, size, feedback):
    model, state = compressed("topk:0.1", feedback)
    lost(model, rank, range(3))
    state.set_policy("none")
    lost(model, rank, range(3, 5))
    near_zero(*lost(model, rank, [5]).values(), atol=1e-6)
    assert not state.residual_norms()


@on_ranks(2, **PATIENT)
def test_a_policy_that_is_refused_changes_nothing(rank, size):
    model = DistributedDataParallel(network())
    state = pycomm.compress(model, "int4")
    assert pycomm.state_of(model) is state
    assert pycomm.state_of(nn.Sequential(model)) is state
    assert pycomm.state_of(network()) is None
    train(model, rank, 1)
    with pytest.raises(pycomm.Error, match="compressed already"):
        pycomm.compress(model, "int8")
    with pytest.raises(ValueError, match="unknown codec"):
        state.set_policy("int9")
    with pytest.raises(pycomm.WireMismatch, match="ranks do not compress alike"):
        state.set_policy("int8" if rank == 0 else "int4")
    sharded = pycomm.compress(fully_shard(network()), "int4")
    with pytest.raises(ValueError, match="powersgd"):
        sharded.set_policy("powersgd:2")
    assert sharded.decisions["0.weight"].codec.name == "quant"
    state.set_policy(Policy("int4", warmup=10**6))
    train(model, rank, 1)
    assert state.decisions["0.weight"].exact


SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import pycomm
dist.init_process_group("gloo")
sharded = fully_shard(torch.nn.Linear(64, 64))
early = pycomm.state_of(sharded)  # before its first forward, as where a checkpoint is loaded
model = DistributedDataParallel(torch.nn.Linear(64, 64))
for net in (sharded, model):
    net(torch.ones(2, 64)).sum().backward()
found = pycomm.state_of(model)
assert early is pycomm.state_of(sharded) and early.residual_norms() and found.residual_norms()
if dist.get_rank() == 0:
    print("TEXT", pycomm.monitor.text())
dist.destroy_process_group()
"""


def test_scripts_under_run_find_their_states(tmp_path):
    command = ["-m", "pycomm.run", "--codec", "int4", "script.py"]
    output = launch(*command, folder=tmp_path, script=SCRIPT)
    assert "TEXT model 0: step 1" in output


@on_ranks(2, **PATIENT)
def test_a_model_keeps_its_number_in_the_monitor(rank, size):
    gc.collect()  # what other tests have left
    others = pycomm.monitor.snapshot().keys()
    model, state = compressed("int8")
    (number,) = pycomm.monitor.snapshot().keys() - others
    for step in range(4):
        if step == 2:
            state.set_policy("int4")
        reduced(model, gradients(rank, step))
        assert pycomm.monitor.snapshot()[number].step == step + 1


# --------------------------------------------------------------------------------- dropped models
# A model that is dropped leaves the monitor at once, not when the garbage collector runs.


@on_ranks(2)
def test_a_model_that_is_dropped_leaves_the_monitor(rank, size):
    DistributedDataParallel(nn.Linear(2, 2))  # torch keeps the first one of a process alive
    gc.collect()
    gc.disable()
    try:
        before = set(monitor.snapshot())
        model = DistributedDataParallel(nn.Linear(64, 64))
        state = pycomm.compress(model, codec="int4")
        model(torch.ones(2, 64)).sum().backward()
        assert state.step == 1
        assert len(set(monitor.snapshot()) - before) == 1
        del model, state
        assert set(monitor.snapshot()) == before
    finally:
        gc.enable()
