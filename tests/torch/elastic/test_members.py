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
from tests.torch.elastic.member import Member, on_members, until_lost
from tests.torch.harness import alike, all_equal, equal, network, train_step, values
from tests.torch.pool import on_ranks


def owed(state: Any, ranks: int) -> dict[str, torch.Tensor]:
    """Return what this rank's residuals are as a part of the average, by parameter."""
    state.settle(last=False)
    assert state.residuals.ranks == ranks
    found = {name: state.residuals[name] for name in state.codecs if name in state.residuals}
    return {n: state.residuals.added(n, 0, one.numel).double() for n, one in found.items()}


def check_owed(before: Any, state: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """What the members owe together is what those of them that are not new owed before."""
    after = owed(state, dist.get_world_size())
    names = [name for name, numel in sizes().items() if numel > 4096]
    for name in names:
        parts = after.get(name, torch.zeros(sizes()[name], dtype=torch.double))
        was = before[name] if before else torch.zeros_like(parts)
        sums = torch.stack([was, parts])
        dist.all_reduce(sums)
        # The float32 residuals were multiplied by a ratio, and those of owners added.
        torch.testing.assert_close(sums[1], sums[0], rtol=rtol, atol=atol)
        assert sums[0].abs().max() > 0


def sizes() -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in network().named_parameters()}


def wrap(
    net: nn.Module, codec: str, feedback: str = "residual", **options: Any
) -> tuple[Any, Any, Any]:
    model = DistributedDataParallel(net, **{"bucket_cap_mb": 0.02, **options})
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
        ("int4 6:eden:bits=2", "residual", "auto"),  # who stays pays, who is new has nothing to pay
    ],
)
def test_members_keep_residuals_and_new_ones_have_none(
    rank, member, handles, codec, feedback, transport
):
    """Three train; the second leaves, the others go on with the same model; it comes back."""
    model, state, optimizer = wrap(network(), codec, feedback)
    train(model, optimizer, 3)
    before = owed(state, 3)
    if rank != 1:
        member.form(2, [handles[0], handles[2]])
        state.follow_members()
        check_owed(before, state)
        train(model, optimizer, 2, first=3)
        assert state.step == 5
        assert state.residuals.ranks == 2
        assert alike(*model.parameters(), torch.tensor(state.step))
        before = owed(state, 2)
    member.form(3, [handles[2], handles[1], handles[0]])
    model, fresh, optimizer = wrap(model.module, codec, feedback)
    fresh.adopt_state(None if rank == 1 else state)
    check_owed(None if rank == 1 else before, fresh)
    assert rank != 1 or all(worker == 0 for worker, _ in fresh.residual_norms().values())
    train(model, optimizer, 3, first=5)
    assert fresh.step == 8
    assert fresh.overflows == 0
    assert alike(*model.parameters(), torch.tensor(fresh.step))


@on_members(4, formed=False, dies={1})
def test_a_killed_member_is_replaced(rank, member, handles):
    """One of three is killed in the middle of a backward; two go on, and another process joins."""
    joins, left = rank == 3, rank in (0, 2)
    state: Any = None
    net = network()
    if not joins:
        member.form(1, handles[:3])
        model, state, optimizer = wrap(net, "int4")
        train(model, optimizer, 3)
        if rank == 1:
            net[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(pycomm.PeerLost):
            train(model, optimizer, 1, first=3)
    if left:
        before = owed(state, 3)
        del model  # its reducer listens to the parameters
        member.form(2, [handles[0], handles[2]])
        model, fresh, optimizer = wrap(net, "int4")
        fresh.adopt_state(state)
        state = fresh
        check_owed(before, state)
        assert state.step == 4
        train(model, optimizer, 2, first=3)
        assert alike(*model.parameters(), torch.tensor(state.step))
        before = owed(state, 2)
        del model
    member.form(3, [handles[0], handles[2], handles[3]])
    model, fresh, optimizer = wrap(net, "int4")
    fresh.adopt_state(state)
    check_owed(before if left else None, fresh)
    train(model, optimizer, 2, first=5)
    assert fresh.step == 8
    assert alike(*model.parameters(), torch.tensor(fresh.step))


def two(rank: int, member: Member, handles: list[str], codec: str, steps: int) -> Any:
    """Two train; return what the third has, too, and a function by which it joins.

    Its buckets are fixed, and its first backward takes over the others'.
    """
    member.form(1, handles[2:] if rank == 2 else handles[:2])
    model, state, optimizer = wrap(network(), codec, find_unused_parameters=True)
    if rank < 2:
        train(model, optimizer, steps)

    def join() -> None:
        member.form(2, handles)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)

    return model, state, optimizer, join


@on_members(3, formed=False)
@pytest.mark.parametrize("what", ["int4", "fp32"])
def test_a_member_joins_while_compression_goes_on_or_ends(rank, member, handles, what):
    """Only who stays has residuals to pay, and makes its buckets anew when they are paid."""
    model, state, optimizer, join = two(rank, member, handles, "int4", steps=3)
    join()
    if what == "fp32":
        state.set_policy("fp32")
    train(model, optimizer, 4, first=4)
    assert bool(state.residual_norms()) == (what == "int4")
    assert what != "int4" or state.step == 7
    assert alike(*model.parameters(), torch.tensor(state.step))


@on_members(3, formed=False)
@pytest.mark.parametrize("codec", ["int4 warmup=4", "auto"])
def test_policies_go_on_alike_on_old_and_new_members(rank, member, handles, codec):
    """A schedule, a choice by measurements and a guard go on alike on all, new ones included."""
    model, state, optimizer, join = two(rank, member, handles, codec, steps=7)
    join()
    train(model, optimizer, 12, first=7)
    decided: list[Any] = [None] * 3
    dist.all_gather_object(decided, {name: str(d) for name, d in state.decisions.items()})
    assert decided[0] == decided[1] == decided[2]
    assert alike(*model.parameters(), torch.tensor(state.step))


# ------------------------------------------------------------------ what does not fit


@on_members(3, formed=False)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("codec", "do not compress alike.*bits=8"),
        ("model", "do not compress alike"),
        ("sizes", "has other parameters in a bucket"),
        ("buckets", "do not have the same buckets"),
    ],
)
def test_a_new_member_that_does_not_fit_is_named_on_all(rank, member, handles, what, text):
    """What a new member brings differs: all are told before a value is averaged."""
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
    model, state, optimizer = wrap(net, codec, **options)
    if not joins:
        train(model, optimizer, 3)
    before = values(net)
    member.form(2, handles)
    with pytest.raises(pycomm.WireMismatch, match=text):
        train(model, optimizer, 1, first=3)
    assert equal(values(net), before)
    member.meet("seen")
    if joins:
        return
    member.form(3, handles[:2])  # without it
    model, fresh, optimizer = wrap(net, codec)
    fresh.adopt_state(state)
    train(model, optimizer, 2, first=3)
    assert fresh.step >= 5
    assert alike(*model.parameters(), torch.tensor(fresh.step))


@on_members(2)
def test_a_state_that_cannot_follow_says_what_to_do(member, handles):
    model = DistributedDataParallel(network())
    outer = pycomm.LocalSGD(model.module, every=1, codec="int4")
    outer.step()
    member.form(2, handles[::-1])
    with pytest.raises(pycomm.Error, match="make a new LocalSGD"):
        outer.step()
    again = pycomm.LocalSGD(model.module, every=1, codec="int4")
    again.state.adopt_state(outer.state)
    again.step()


# --------------------------------------------------------------------------------- shrink and go on
# A rank is killed during training: the others shrink the group, continue, and keep residuals.


def shrink(gone: set[int]) -> set[int]:
    """Shrink the group to the survivors; return the lost ranks, which may have become more."""
    while True:
        try:
            dist.shrink_group(sorted(gone), shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
            return gone
        except pycomm.PeerLost as another:
            more = set(another.ranks)
        assert not gone & more
        gone |= more


def survivors_are_equal(results: list[Any]) -> None:
    all_equal([result for result in results if result is not None])


@on_ranks(then=survivors_are_equal)
@pytest.mark.parametrize(("ranks", "dies"), [(3, {1}), (4, {1, 2})])
def test_survivors_train_on_with_their_residuals(rank, size, dies):
    how = "int4", "residual:storage=int8"
    model, state, optimizer = wrap(network(), *how)
    train(model, optimizer, 3)
    if rank in dies:  # during backward, while some buckets are being reduced
        model.module[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(pycomm.PeerLost) as caught:
        train(model, optimizer, 1, first=3)
    gone = set(caught.value.ranks)
    del caught
    before = owed(state, size)
    assert shrink(gone) == dies
    net = model.module
    del model
    model, fresh, optimizer = wrap(net, *how)
    fresh.adopt_state(state)
    assert fresh.step == 4
    check_owed(before, fresh, 2.0**-7, 2.0**-7)  # int8 has 8 bits of the largest of 32 values
    train(model, optimizer, 5, first=3)
    assert fresh.overflows == 0
    return values(model)


def both_survive(results: list[Any]) -> None:
    assert results == [[5.0], None, None, [5.0]]


@on_ranks(4, then=both_survive, backend=None, dies={1, 2})
def test_two_deaths_at_once_are_both_named(rank, size, store):
    options = pycomm.Options(transport="tcp")  # the test above uses the other one
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, pg_options=options)
    dist.barrier()
    if rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLost) as caught:
        until_lost()
    assert caught.value.rank in caught.value.ranks
    assert set(caught.value.ranks) <= {1, 2}
    with pytest.raises(pycomm.PeerLost, match="rank 2 of the group that shrinks") as caught:
        dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    assert (caught.value.rank, caught.value.ranks) == (2, [2])
    dist.shrink_group([1, 2], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    numbers = torch.tensor([1.0 + rank])
    dist.all_reduce(numbers)
    return numbers.tolist()
