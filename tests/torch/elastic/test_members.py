"""A compressed model goes on when the members of its group change: leave, die, join, come back."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.elastic.member import Member, on_members
from tests.torch.harness import network, train_step


def owed(state: Any, ranks: int) -> dict[str, torch.Tensor]:
    """Return what this rank's residuals are as a part of the average, by parameter."""
    state.settle(last=False)
    assert state.residuals.ranks == ranks
    found = {name: state.residuals[name] for name in state.codecs if name in state.residuals}
    return {n: state.residuals.added(n, 0, one.numel).double() for n, one in found.items()}


def check_owed(before: Any, state: Any) -> None:
    """What the members owe together is what those of them that are not new owed before."""
    after = owed(state, dist.get_world_size())
    names = [name for name, numel in sizes().items() if numel > 4096]
    for name in names:
        parts = after.get(name, torch.zeros(sizes()[name], dtype=torch.double))
        was = before[name] if before else torch.zeros_like(parts)
        sums = torch.stack([was, parts])
        dist.all_reduce(sums)
        # The float32 residuals were multiplied by a ratio, and those of owners added.
        torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-7)
        assert sums[0].abs().max() > 0


def sizes() -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in network().named_parameters()}


def check_equal(model: nn.Module, state: Any) -> None:
    """All members have the same parameters, to the bit, and have taken as many steps."""
    mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
    mine = torch.cat([mine, torch.tensor([float(state.step)])])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody)


def wrap(net: nn.Module, codec: str, feedback: str, **options: Any) -> tuple[Any, Any, Any]:
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **options)
    state = pycomm.compress(model, codec, feedback=feedback)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        train_step(model, optimizer, dist.get_rank(), number)


@on_members(3)
@pytest.mark.parametrize(
    ("codec", "feedback", "transport"),
    [
        ("int4", "residual", "auto"),
        ("int4", "residual", "tcp"),
        ("topk:0.05", "momentum:0.5", "auto"),
        ("sign", "residual", "auto"),
        ("powersgd:2", "residual", "auto"),
        ("int4 6:eden:bits=2", "residual", "auto"),  # who stays pays, who is new has nothing to pay
    ],
)
def test_members_keep_residuals_and_new_ones_have_none(
    rank, size, store, codec, feedback, transport
):
    """Three train; the second leaves, the others go on with the same model; it comes back."""
    member = Member(rank, size, store, transport=transport)
    handles = member.handles("all")
    member.form(1, handles)
    model, state, optimizer = wrap(network(), codec, feedback)
    train(model, optimizer, 3)
    owes = "powersgd" not in codec
    before = owed(state, 3) if owes else None
    if rank != 1:
        member.form(2, [handles[0], handles[2]])
        state.follow_members()
        if owes:
            check_owed(before, state)
        train(model, optimizer, 2, first=3)
        assert state.step == 5
        assert state.residuals.ranks == 2
        check_equal(model, state)
        before = owed(state, 2) if owes else None
    member.form(3, [handles[2], handles[1], handles[0]])
    model, fresh, optimizer = wrap(model.module, codec, feedback)
    fresh.adopt_state(None if rank == 1 else state)
    if owes:
        check_owed(None if rank == 1 else before, fresh)
        assert rank != 1 or all(worker == 0 for worker, _ in fresh.residual_norms().values())
    train(model, optimizer, 3, first=5)
    assert fresh.step == 8
    assert fresh.overflows == 0
    check_equal(model, fresh)


@on_members(4, dies={1})
def test_a_killed_member_is_replaced(rank, size, store):
    """One of three is killed in the middle of a backward; two go on, and another process joins."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    joins, left = rank == 3, rank in (0, 2)
    state: Any = None
    net = network()
    if not joins:
        member.form(1, handles[:3])
        model, state, optimizer = wrap(net, "int4", "residual")
        train(model, optimizer, 3)
        if rank == 1:
            net[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(pycomm.PeerLost):
            train(model, optimizer, 1, first=3)
    if left:
        before = owed(state, 3)
        del model  # its reducer listens to the parameters
        member.form(2, [handles[0], handles[2]])
        model, fresh, optimizer = wrap(net, "int4", "residual")
        fresh.adopt_state(state)
        state = fresh
        check_owed(before, state)
        assert state.step == 4
        train(model, optimizer, 2, first=3)
        check_equal(model, state)
        before = owed(state, 2)
        del model
    member.form(3, [handles[0], handles[2], handles[3]])
    model, fresh, optimizer = wrap(net, "int4", "residual")
    fresh.adopt_state(state)
    check_owed(before if left else None, fresh)
    train(model, optimizer, 2, first=5)
    assert fresh.step == 8
    check_equal(model, fresh)


@on_members(3)
def test_a_model_with_fixed_buckets_joins_as_it_is(rank, size, store):
    """A model with fixed buckets joins as it is, and its first backward takes over the others."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    joins = rank == 2
    member.form(1, handles[2:] if joins else handles[:2])
    model, state, optimizer = wrap(network(), "int4", "residual", find_unused_parameters=True)
    if not joins:
        train(model, optimizer, 3)
    member.form(2, handles)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    train(model, optimizer, 2, first=3)
    assert state.step == 5
    check_equal(model, state)


@on_members(3)
@pytest.mark.parametrize("ends", [False, True], ids=["set_policy", "remove"])
def test_a_group_that_a_member_has_joined_becomes_exact(rank, size, store, ends):
    """Only who stays has residuals to pay, and makes its buckets anew when they are paid."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    joins = rank == 2
    member.form(1, handles[2:] if joins else handles[:2])
    model, state, optimizer = wrap(network(), "int4", "residual", find_unused_parameters=True)
    if not joins:
        train(model, optimizer, 3)
    member.form(2, handles)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    if ends:
        state.remove()
    else:
        state.set_policy("fp32")
    train(model, optimizer, 4, first=3)
    assert state.removed == ends
    assert not state.residual_norms()
    check_equal(model, state)


@on_members(3)
def test_a_member_joins_while_compression_ends(rank, size, store):
    """A member joins between the two steps in which compression ends."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    joins = rank == 2
    member.form(1, handles[2:] if joins else handles[:2])
    model, state, optimizer = wrap(network(), "int4", "residual", find_unused_parameters=True)
    if not joins:
        train(model, optimizer, 3)
    state.remove()
    if not joins:
        train(model, optimizer, 1, first=3)
    member.form(2, handles)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    train(model, optimizer, 4, first=4)
    assert state.removed
    check_equal(model, state)


@on_members(3)
@pytest.mark.parametrize("codec", ["int4 warmup=4", "auto"])
def test_policies_go_on_alike_on_old_and_new_members(rank, size, store, codec):
    """A schedule, a choice by measurements and a guard go on alike on all, new ones included."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    joins = rank == 2
    member.form(1, handles[2:] if joins else handles[:2])
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02, find_unused_parameters=True)
    state = pycomm.compress(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not joins:
        train(model, optimizer, 7)
    member.form(2, handles)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    train(model, optimizer, 12, first=7)
    decided: list[Any] = [None] * 3
    dist.all_gather_object(decided, {name: str(d) for name, d in state.decisions.items()})
    assert decided[0] == decided[1] == decided[2]
    check_equal(model, state)


# ------------------------------------------------------------------ what does not fit


@on_members(3)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("codec", "do not compress alike.*bits=8"),
        ("model", "do not compress alike"),
        ("sizes", "has other parameters in a bucket"),
        ("buckets", "do not have the same buckets"),
    ],
)
def test_a_new_member_that_does_not_fit_is_named_on_all(rank, size, store, what, text):
    """What a new member brings differs: all are told before a value is averaged."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    joins = rank == 2
    member.form(1, handles[2:] if joins else handles[:2])
    net: nn.Module = network()
    codec, options = "int4", {"find_unused_parameters": what != "buckets"}
    if joins and what == "codec":
        codec = "int8"
    if joins and what == "model":
        net[3] = nn.Linear(128, 64, bias=False)
    if joins and what == "sizes":
        options["bucket_cap_mb"] = 1
    model = DistributedDataParallel(net, **({"bucket_cap_mb": 0.02} | options))
    state = pycomm.compress(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not joins:
        train(model, optimizer, 3)
    before = [p.detach().clone() for p in net.parameters()]
    member.form(2, handles)
    with pytest.raises(pycomm.WireMismatch, match=text):
        train(model, optimizer, 1, first=3)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    member.meet("seen")
    if joins:
        return
    member.form(3, handles[:2])  # without it
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    fresh = pycomm.compress(model, codec)
    fresh.adopt_state(state)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, first=3)
    assert fresh.step >= 5
    check_equal(model, fresh)


@on_members(2)
def test_a_state_that_cannot_follow_says_what_to_do(rank, size, store):
    member = Member(rank, size, store)
    handles = member.handles("all")
    member.form(1, handles)
    model = DistributedDataParallel(network())
    outer = pycomm.LocalSGD(model.module, every=1, codec="int4")
    outer.step()
    member.form(2, handles[::-1])
    with pytest.raises(pycomm.Error, match="make a new LocalSGD"):
        outer.step()
    again = pycomm.LocalSGD(model.module, every=1, codec="int4")
    again.state.adopt_state(outer.state)
    again.step()
