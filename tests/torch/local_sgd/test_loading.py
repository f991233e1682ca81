"""A state of LocalSGD that is loaded at any point of a step, with exchanges in flight."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm.local_sgd import Blocking, Streamed
from tests.extent import each_value
from tests.torch.harness import batch, equal, network, train_step, values
from tests.torch.pool import on_ranks

FORMS = {
    "blocking": {"exchange": Blocking()},
    "stream": {"exchange": Streamed(2, overlap=2)},
    "on a thread": {"exchange": Streamed(overlap=4), "weighted": True},
}
SAVED, LOADED, END = 8, 11, 15
POINTS = ("made", "forward", "backward", "optimizer", "step", "zero_grad")


class Run:
    """A model in training, of which one can load a state at a point of a step."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.rank, self.model = rank, network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.local = pycomm.LocalSGD(self.model, every=4, codec="int4", **options)

    def saved(self) -> tuple[Any, ...]:
        parts = self.model, self.optimizer, self.local
        return copy.deepcopy(tuple(part.state_dict() for part in parts))

    def load(self, saved: tuple[Any, ...]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch's keeps the tensors
        self.local.load_state_dict(saved[2])

    def train(self, steps: range, load: tuple[str, tuple[Any, ...]] | None = None) -> None:
        """Train; load a state at the named point of the last step, and end there."""
        for step in steps:
            x, y = batch(self.rank, step)

            def comes(point: str, step: int = step) -> bool:
                if load is None or step + 1 < steps.stop or point != load[0]:
                    return False
                self.load(load[1])
                return True

            loss = nn.functional.cross_entropy(self.model(x), y)
            if comes("forward"):
                return
            loss.backward()
            if comes("backward"):
                return
            self.optimizer.step()
            if comes("optimizer"):
                return
            self.local.step(*(len(x),) if self.local.weighted else ())
            if comes("step"):
                return
            self.optimizer.zero_grad()
            if comes("zero_grad"):
                return


@on_ranks(2)
@each_value
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_state_may_be_loaded_at_any_point_of_a_step(rank, size, options):
    run = Run(rank, options)
    run.train(range(SAVED))
    saved = run.saved()
    run.train(range(SAVED, END))
    run.local.finish()
    want, rounds = values(run.model), run.local.rounds
    for point in POINTS:
        other = Run(rank, options)
        if point == "made":
            other.load(saved)
        else:
            other.train(range(LOADED), (point, saved))
        other.optimizer.zero_grad()
        other.train(range(SAVED, END))
        other.local.finish()
        assert equal(values(other.model), want), point
        assert other.local.rounds == rounds, point


@on_ranks(2)
def test_states_of_other_options_are_refused(rank, size):
    saved = pycomm.LocalSGD(network(), every=4, exchange=Streamed(2, overlap=2)).state_dict()
    with pytest.raises(ValueError, match="has 2 fragments, not 1"):
        pycomm.LocalSGD(network(), every=4).load_state_dict(saved)
    with pytest.raises(ValueError, match="with momentum or without"):
        pycomm.LocalSGD(
            network(), every=4, exchange=Streamed(2, overlap=2), momentum=0.0
        ).load_state_dict(saved)
    with pytest.raises(ValueError, match="has version 2, not 1: load it with the pycomm that"):
        pycomm.LocalSGD(network(), every=4).load_state_dict({**saved, "version": 2})


@on_ranks(2)
def test_a_load_waits_for_what_is_in_flight(rank, size):
    """A load waits for the thread that exchanges, and drops its result."""
    model = network()
    options = {"exchange": Streamed(overlap=2), "weighted": True}
    local = pycomm.LocalSGD(model, every=2, codec="int8", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = copy.deepcopy(local.state_dict())
    start = values(model)
    for step in range(6):
        for _ in range(2):
            train_step(model, optimizer, rank, step)
            local.step(1)
        time.sleep(0.1 * (rank == step % 2))
        local.load_state_dict(saved)  # right after a round was sent
        assert equal(values(model), start)
        assert (local.state.step, local.rounds) == (0, 0)
        assert not any(sum(norms) for norms in local.state.residual_norms().values())
