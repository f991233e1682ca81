"""Steps in any order of what can happen to them: used, overflowed, broken off, discarded.

A step that is committed is in the parameters or in the residuals, and one that is rolled back
leaves nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.policy import Policy
from pycomm.reduction.state import CompressionState
from pycomm.reduction.step import StepStatus
from tests.torch.harness import CODED, SHAPES, equal, gradients, mean, near_zero, owed

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
    assert state.residuals is not None
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
                assert step.status is StepStatus.ROLLED_BACK
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
def test_steps_in_any_order_lose_nothing(pool, backend, order):
    pool.run(play, order, ranks=2, backend=backend)
