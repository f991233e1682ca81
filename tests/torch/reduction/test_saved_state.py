"""States: their checkpoints, the errors and warnings when loading one, and steps of any end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.policy import PROTECT, Policy, Rule
from pycomm.reduction.state import CompressionState
from pycomm.reduction.step import StepStatus
from tests.torch.harness import CODED, SHAPES, equal, gradients, heard, mean, near_zero, owed
from tests.torch.pool import on_ranks

# For ranks that import torch on a busy machine.
PATIENT = {"timeout": 60, "deadline": 180}


def network(seed: int = 0, width: int = 96) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))


def wrapped(kind: str) -> DistributedDataParallel:
    net = network()
    if kind == "compiled":
        net = torch.compile(net, backend="eager")
    elif kind == "checkpointed":
        net[2] = checkpoint_wrapper(net[2])
    elif kind == "module":
        net = nn.Sequential()
        net.add_module("module", network())
    return DistributedDataParallel(net)


def train(model: nn.Module, rank: int, steps: int = 3, width: int = 64) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, width, generator=generator)).square().mean().backward()


def same(a: Any, b: Any) -> bool:
    norms = a.residual_norms()
    return bool(norms) and a.step == b.step and norms == b.residual_norms()


def build(kind: str) -> tuple[nn.Module, Any]:
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(network())
    else:
        model = network()
        fully_shard(model[0])
        fully_shard(model)
    return model, pycomm.compress(model, "int4")


# ------------------------------------------------------------------------ torch's Stateful


@on_ranks(2, **PATIENT)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_states_are_stateful_and_keep_their_residuals(rank, size, kind, tmp_path):
    folder = str(tmp_path / "saved")
    model, state = build(kind)
    train(model, rank)
    if kind == "ddp":
        dcp.save({"pycomm": state}, checkpoint_id=folder)
    else:  # the second way to save
        group = dist.new_group(backend="gloo")
        dcp.async_save({"pycomm": state}, checkpoint_id=folder, process_group=group).result()
    _, other = build(kind)
    dcp.load({"pycomm": other}, checkpoint_id=folder)
    assert same(state, other)
    # Models are loaded in place, as in torch's tutorials.
    _, third = build(kind)
    place = {"pycomm": third.state_dict()}
    dcp.load(place, checkpoint_id=folder)
    third.load_state_dict(place["pycomm"])
    assert same(state, third)
    _, fourth = build(kind)
    fourth.load_checkpoint(folder)
    assert same(state, fourth)


@on_ranks(2, **PATIENT)
def test_a_state_whose_residuals_were_left_out_is_refused(rank, size):
    model, state = build("ddp")
    train(model, rank)
    saved = state.state_dict()
    _, other = build("ddp")
    lost = {**saved, f"rank{rank}": other.state_dict()[f"rank{rank}"]}
    with pytest.raises(ValueError, match=f"its entry rank{rank} of step 0"):
        other.load_state_dict(lost)
    theirs = {key: value for key, value in saved.items() if key != f"rank{rank}"}
    with pytest.raises(ValueError, match=rf"rank {rank} of 2, which needs what rank{rank} has"):
        other.load_state_dict(theirs)
    later = {**saved, "about": ({**saved["about"][0], "version": 99},)}
    with pytest.raises(ValueError, match="has version 99, not 2: load it with the pycomm that"):
        other.load_state_dict(later)
    assert other.step == 0  # nothing of them was taken over
    other.load_state_dict(saved)
    assert same(state, other)


# ------------------------------------------------------------------------ names


@on_ranks(2, **PATIENT)
@pytest.mark.parametrize("kind", ["compiled", "checkpointed", "module"])
def test_residuals_are_loaded_into_another_wrapping(rank, size, kind):
    head = Rule(codec="int8", name="*2.weight", reason="head")
    policy = Policy("int4", (head, *PROTECT))
    for before, after in (("plain", kind), (kind, "plain")):
        model = wrapped(before)
        state = pycomm.compress(model, policy)
        train(model, rank)
        model = wrapped(after)
        other = pycomm.compress(model, policy)
        other.load_state_dict(state.state_dict())
        assert sorted(state.residual_norms().values()) == sorted(other.residual_norms().values())
        assert set(other.residual_norms()) <= set(other.decisions)
        train(model, rank, 1)
        assert len(other.residual_norms()) == 2


@on_ranks(2, **PATIENT)
def test_rules_match_names_in_any_wrapping(rank, size):
    for kind in ("plain", "compiled", "checkpointed"):
        for pattern in ("2.weight", "module.2.weight", "_orig_mod.2.weight"):
            rules = (Rule(codec="int8", name=pattern, reason="head"), *PROTECT)
            with heard() as told:
                state = pycomm.compress(wrapped(kind), Policy("int4", rules))
            assert state.decisions["2.weight"].reason == "head"
            assert state.decisions["0.weight"].reason == "default"
            assert not any("matches no parameter" in text for text in told)
    with heard() as told:
        for model in (wrapped("plain"), fully_shard(network())):
            pycomm.compress(model, Policy("int4", (Rule(codec="int8", name="*.2.*"), *PROTECT)))
        local = Policy("int4", (Rule(codec="int8", name="2.wieght"), *PROTECT))
        pycomm.LocalSGD(network(), every=4, codec=local)
    warned = [text for text in told if "matches no parameter" in text]
    if rank > 0:
        assert not warned
        return
    assert len(warned) == 3
    assert all("2.weight" in text for text in warned)


class Renamed(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.add_module("2", nn.Linear(width, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("2")(self.first(x))


@on_ranks(2, **PATIENT)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_loading_tells_of_other_names_and_sizes(rank, size, kind):
    model, state = build(kind)
    train(model, rank)

    def another(net: nn.Module) -> tuple[nn.Module, Any]:
        other = DistributedDataParallel(net) if kind == "ddp" else fully_shard(net)
        return other, pycomm.compress(other, "int4")

    renamed, other = another(Renamed())
    with heard() as told:
        other.load_state_dict(state.state_dict())
    assert list(other.residual_norms()) == ["2.weight"]
    assert [("0.weight" in text, "first.weight" in text) for text in told] == [(True, True)] * (
        rank == 0
    )
    train(renamed, rank)
    assert set(other.residual_norms()) == {"first.weight", "2.weight"}
    resized, other = another(network(width=128))
    with pytest.raises(ValueError, match=r"belongs to another model: 0\.weight .*2\.weight"):
        other.load_state_dict(state.state_dict())
    train(resized, rank)


# ------------------------------------------------------------------------------- steps in any order
# Steps in any order of what can happen to them: used, overflowed, broken off, discarded. A step
# that is committed is in the parameters or in the residuals, and one that is rolled back leaves
# nothing.


ENDS = ("is used", "overflows", "breaks off", "is discarded", "is discarded late")
BETWEEN = ("is looked at", "is saved and loaded", "has another codec", "is exact")
ORDERS = st.lists(st.sampled_from(ENDS + BETWEEN + ("is used",)), min_size=4, max_size=12)


def made() -> CompressionState:
    state = CompressionState(Policy("int4", guard=None))
    for name, shape in SHAPES.items():
        state.add(name, torch.empty(shape))
    return state


def kept(state: CompressionState) -> dict[str, Any]:
    """Return all residuals that are not zero, however they are stored."""
    state.settle()
    found = {name: state.residuals[name] for name in CODED if name in state.residuals}
    values = {
        (name, role): one.current(role).clone()
        for name, one in found.items()
        for role, _ in one.pairs()
    }
    return {key: each for key, each in values.items() if each.any()}


def advance(rank: int, state: CompressionState, number: int, end: str) -> dict[str, torch.Tensor]:
    """Take a step with a bucket for each parameter; return the averages."""
    state.begin_step()
    found = {}
    for name, gradient in gradients(rank, number).items():
        if end == "breaks off" and name == "bias":
            return found
        flat = gradient.reshape(-1).clone()
        if end == "overflows" and (rank, name) == (1, "small"):
            flat[3] = float("inf")
        found[name] = state.wait(state.reduce(flat, [name])).view(gradient.shape)
        if end == "is discarded":
            state.discard()
    state.end_step()
    if end == "is discarded late":
        state.discard()
    return found


def play(rank: int, size: int, order: list[str]) -> None:
    state = made()
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for number, event in enumerate(order):
        before = kept(state)
        if event == "is looked at":
            norms = state.residual_norms().items()
            assert {name for name, pair in norms if any(pair)} == {name for name, _ in before}
        elif event == "is saved and loaded":
            saved, state = state.state_dict(), made()
            state.load_state_dict(saved)
        elif event == "has another codec":
            state.set_policy(Policy("int8", guard=None))
        elif event == "is exact":
            state.set_policy(Policy("fp32", guard=None))
        else:
            found = advance(rank, state, number, event)
            step = state.reducer.step
            state.settle()
            assert state.step == sum(one in ENDS for one in order[: number + 1])
            if event != "is used":
                overflows = event == "overflows"
                undone = StepStatus.OVERFLOWED if overflows else StepStatus.ROLLED_BACK
                assert step.status is undone
                assert equal(kept(state), before)
                continue
            assert step.status is StepStatus.COMMITTED
            for name, average in mean(size, number).items():
                missing[name] += average - found[name]
            continue
        assert equal(kept(state), before)
    left = owed(state)
    near_zero(*(missing[name] - left[name] for name in SHAPES))


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(order=ORDERS)
@example(order=["is used", "is exact", "overflows", "is used"])  # which pays nothing, then all
def test_steps_in_any_order_lose_nothing(pool, backend, order):
    pool.run(play, order, ranks=2, backend=backend)
