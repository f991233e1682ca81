"""LocalSGD with a quorum: slow ranks hold nobody up, and all end with the same parameters."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.local_sgd import Quorum
from pycomm.local_sgd.progress import Progress, Round
from tests.torch.harness import equal
from tests.torch.local_sgd.test_local_sgd import PLAIN, train
from tests.torch.pool import on_ranks

BACKENDS = ["pycomm", "gloo"]


def ranks(offers: str, clock: float) -> list[Progress]:
    """A letter for each rank: t trains, o has offered, f finishes and has offered, F has not."""
    return [Progress(c in "of", 1.0, True, c in "fF", clock, 0) for c in offers]


@pytest.mark.parametrize(
    ("quorum", "offers", "closes"),
    [
        (3, "ooo", True),
        (2, "oot", False),  # within the grace
        (2, "ott", False),
        (1, "ttt", False),
        (2, "off", True),  # one still trains, and what it has is enough
        (2, "tff", False),
        (3, "ffo", True),
        (2, "fff", True),
        (2, "ffF", False),
        (1, "oft", False),
    ],
)
def test_a_round_closes_at_once_only_if_nobody_is_awaited(quorum, offers, closes):
    assert Round(quorum, 5.0).closes(ranks(offers, 0.0)) is closes


def test_the_grace_begins_with_the_quorum():
    rule = Round(2, 5.0)
    assert not rule.closes(ranks("ott", 100.0))
    assert not rule.closes(ranks("oot", 110.0))
    assert not rule.closes(ranks("oot", 114.9))
    assert rule.closes(ranks("oot", 115.0))
    assert rule.is_wanted(ranks("oot", 0.0))
    assert not rule.is_wanted(ranks("ott", 0.0))


def test_a_full_quorum_has_the_bits_of_blocking(pool):
    options = {"every": 4, "codec": "int8"}
    (a, _, _), _ = pool.run(train, 8, options)
    (b, _, _), (c, _, _) = pool.run(train, 8, {**options, "exchange": Quorum(2)})
    assert equal(b, c)
    assert equal(a, b)


def check_slow(rank: int, size: int, grace: float) -> tuple[list[float], int]:
    """Every step moves a rank by 1. Without a grace the last rank's first step takes all training.

    With one, the last rank's steps take a tenth of a second each.
    """
    model = nn.Linear(40, 60, bias=False)
    nn.init.zeros_(model.weight)
    local = pycomm.LocalSGD(model, every=4, exchange=Quorum(2, grace=grace), **PLAIN)
    store = dist.distributed_c10d._get_default_store()
    for step in range(3 if rank == 2 else 16):
        with torch.no_grad():
            model.weight += 1.0
        if rank == 2 and grace == 0 and step == 0:
            store.wait(["trained0", "trained1"])
        elif rank == 2:
            time.sleep(0.1)
        local.step()
    if rank < 2:
        assert local.rounds == 4
        store.set(f"trained{rank}", "")
    local.finish()
    return model.weight.detach().flatten()[:3].tolist(), local.late


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_rank_holds_nobody_up(pool, backend):
    (a, _), (b, _), (c, late) = pool.run(check_slow, 0.0, backend=backend, ranks=3)
    assert a == b == c
    assert late == 4  # all rounds of the fast ranks
    # Four rounds of the fast ranks, and the slow one's three steps in the last round.
    assert a[0] == pytest.approx(4 * 4 + 3, abs=1e-4)


def test_what_a_slow_rank_has_within_the_grace_takes_part(pool):
    (a, _), (b, _), (c, late) = pool.run(check_slow, 20.0, ranks=3)
    assert a == b == c
    assert late == 0
    # The fast ranks wait for the slow one's step in progress. A round of its n steps moves the
    # start by (4 * 4 + 4 * 4 + n * n) / (4 + 4 + n); which of its three steps go together is open.
    moved = {n: (32 + n * n) / (8 + n) for n in (1, 2, 3)}
    ends = [3 * moved[1] + 4, moved[1] + moved[2] + 8, moved[3] + 12]
    assert any(a[0] == pytest.approx(end, abs=1e-4) for end in ends)


def check_overlap(rank: int, size: int) -> list[float]:
    """What a rank does while its offer travels is kept, and sent in its next round."""
    model = nn.Linear(40, 60, bias=False)
    nn.init.zeros_(model.weight)
    local = pycomm.LocalSGD(model, every=4, exchange=Quorum(2, overlap=2), **PLAIN)
    for _ in range(12):
        with torch.no_grad():
            model.weight += 1.0
        local.step()
        # Nothing is lost: all ranks move alike, so each is where its own steps have brought it.
    local.finish()
    return model.weight.detach().flatten()[:2].tolist()


def test_steps_during_an_exchange_are_not_lost(pool):
    a, b = pool.run(check_overlap)
    assert a == b
    assert a[0] == pytest.approx(12.0, abs=1e-4)


def check_finish_twice(rank: int, size: int) -> float:
    model = nn.Linear(40, 60, bias=False)
    nn.init.zeros_(model.weight)
    local = pycomm.LocalSGD(model, every=4, exchange=Quorum(1, grace=0.0), **PLAIN)
    for _ in range(2):
        for _ in range(5 + rank):
            with torch.no_grad():
                model.weight += 1.0
            local.step()
        with pytest.raises(pycomm.Error, match=r"call finish\(\)"):
            local.state_dict()
        local.finish()
        mine = model.weight.detach().clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, model.weight)
    saved = local.state_dict()
    other = nn.Linear(40, 60, bias=False)
    other.load_state_dict(model.state_dict())
    resumed = pycomm.LocalSGD(other, every=4, exchange=Quorum(1, grace=0.0), **PLAIN)
    resumed.load_state_dict(saved)
    resumed.step()
    resumed.finish()
    assert torch.equal(other.weight, model.weight)
    return float(model.weight[0, 0])


def test_training_goes_on_after_finish(pool):
    assert len(set(pool.run(check_finish_twice))) == 1


def check_late_load(rank: int, size: int) -> float:
    """One rank loads long after the other, whose rounds wait for it, and threads talk meanwhile."""
    model = nn.Linear(40, 60, bias=False)
    nn.init.zeros_(model.weight)
    local = pycomm.LocalSGD(model, every=1, exchange=Quorum(1, grace=0.0), **PLAIN)

    def train() -> None:
        for _ in range(3):
            with torch.no_grad():
                model.weight += 1.0
            local.step()
        local.finish()

    train()
    saved, weights = local.state_dict(), model.weight.detach().clone()
    resumed = pycomm.LocalSGD(model, every=1, exchange=Quorum(1, grace=0.0), **PLAIN)
    with torch.no_grad():
        model.weight.copy_(weights)
    if rank == 1:
        time.sleep(0.5)
    resumed.load_state_dict(saved)
    local = resumed
    train()
    mine = model.weight.detach().clone()
    dist.broadcast(mine, 0)
    assert torch.equal(mine, model.weight)
    return local.rounds - saved["rounds"]


def test_rounds_wait_for_a_rank_that_loads_late(pool):
    one, other = pool.run(check_late_load)
    assert one == other > 0


@on_ranks(3, dies=[1])
def test_a_rank_that_dies_is_named(rank, size):
    model = nn.Linear(40, 60, bias=False)
    local = pycomm.LocalSGD(model, every=2, exchange=Quorum(2, grace=0.0), **PLAIN)

    def go_on() -> None:
        for step in range(400):
            with torch.no_grad():
                model.weight += 1.0
            if rank == 1 and step == 5:
                os._exit(3)
            local.step()
        local.finish()

    with pytest.raises(pycomm.PeerLost, match="rank 1"):
        go_on()


@on_ranks(2)
def test_parameters_that_change_are_refused(rank, size):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    local = pycomm.LocalSGD(model, every=2, exchange=Quorum(2), **PLAIN)
    model[1].requires_grad_(True)
    local.step()
    with pytest.raises(pycomm.Error, match=r"call finish\(\) on all ranks"):
        local.step()
    # Who leaves the group earlier would end the other's first step.
    store = dist.group.WORLD.get_group_store()
    store.set(f"refused/{rank}", "")
    store.wait([f"refused/{r}" for r in range(size)])
