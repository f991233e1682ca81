"""Changing the policy of a compressed model without losing residuals."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import monitor
from pycomm.policy import Policy
from tests.extent import each_value
from tests.torch.harness import (
    CODED,
    SHAPES,
    compressed,
    gradients,
    lost,
    near_zero,
    reduced,
)
from tests.torch.interpreter import launch
from tests.torch.pool import on_ranks
from tests.torch.reduction.test_saved_state import PATIENT, network, train


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
def test_a_step_that_overflows_pays_nothing(rank, size):
    """A step that is not finite applies no residuals, so the next one does."""
    model, state = compressed("int4")
    before = lost(model, rank, range(3))
    state.set_policy("none")
    bad = gradients(rank, 3)
    if rank == 0:
        bad["big"].view(-1)[0] = float("nan")
    reduced(model, bad)
    after = lost(model, rank, [4])
    near_zero(before["big"] + after["big"], atol=2e-5)


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
    (tmp_path / "script.py").write_text(SCRIPT)
    output = launch("-m", "pycomm.run", "--codec", "int4", "script.py", folder=tmp_path)
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
def test_a_state_that_is_dropped_leaves_the_monitor(rank, size):
    gc.collect()
    gc.disable()
    try:
        before = set(monitor.snapshot())
        for codec in ("int4", "auto", "powersgd:2"):
            state = pycomm.CompressionState(codec)
            assert len(set(monitor.snapshot()) - before) == 1
            state.set_policy("int8")
            assert len(set(monitor.snapshot()) - before) == 1
            del state
            assert set(monitor.snapshot()) == before, codec
    finally:
        gc.enable()


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
