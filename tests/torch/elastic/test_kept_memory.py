"""Memory that ranks of a host share is kept when their group gets other members.

A tensor in it, such as a bucket of DDP, is then addressed in place by the new group, too.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.torch.elastic.member import Member, check_sum, on_members

NUMEL = 300_007
SOON = timedelta(seconds=0.5)


def shared(member: Member) -> torch.Tensor:
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    return member.backend.allocate_tensor(NUMEL, **options)


def segment(tensor: torch.Tensor) -> str:
    """Return device and inode of the file of a tensor's memory, and its name."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            words = line.split()
            begin, end = (int(word, 16) for word in words[0].split("-"))
            if begin <= address < end:
                return " ".join(words[3:])
    raise AssertionError("the tensor's memory is not mapped")


def check_in(tensor: torch.Tensor, times: int = 3) -> None:
    """Sum whole numbers in this memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    steps = torch.arange(NUMEL) % 1000
    for turn in range(times):
        tensor.copy_(steps * (rank + 1) + turn)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, (steps * (size * (size + 1) // 2) + turn * size).float())


def in_place(member: Member, tensor: torch.Tensor) -> bool:
    """True if a sum of the tensor leaves nothing in the slots of the window for others to read."""
    before = member.backend.sent_bytes
    check_in(tensor, 1)
    return bool(member.backend.sent_bytes == before)


@on_members(3)
def test_shared_memory_is_kept_for_the_next_group(rank, size, store):
    member = Member(rank, size, store)
    handles = member.handles("all")
    member.form(1, handles)
    ours = shared(member)
    where = segment(ours)
    assert "memfd:pycomm" in where
    assert in_place(member, ours)
    for uuid, members in ((2, handles), (3, handles[::-1]), (4, [handles[2], handles[0]])):
        if handles[rank] not in members:
            break
        member.form(uuid, members)
        fresh = shared(member)
        assert segment(fresh) == where, "new tensors lie in the same memory"
        for tensor in (ours, fresh):
            assert in_place(member, tensor)
            check_in(tensor)
    if rank == 1:  # it was left out, and goes on calling the group that it knows
        ours.fill_(7.0)
        with pytest.raises(pycomm.Error):
            dist.all_reduce(ours)
    member.meet("done")


@on_members(3)
def test_with_a_new_member_the_memory_is_new(rank, size, store):
    member = Member(rank, size, store)
    handles = member.handles("all")
    if rank < 2:
        member.form(1, handles[:2])
        ours = shared(member)
        check_in(ours)
        where = segment(ours)
    member.form(2, handles)
    fresh = shared(member)
    assert in_place(member, fresh)
    if rank < 2:
        assert segment(fresh) != where, "the new member has not mapped it"
    check_in(ours if rank < 2 else fresh)
    check_sum()


@on_members(3)
def test_memory_that_was_taken_back_is_not_kept(rank, size, store):
    """A rank does not come to an operation, in which the others let it write to their memory."""
    member = Member(rank, size, store)
    handles = member.handles("all")
    member.form(1, handles)
    ours = shared(member)
    check_in(ours)
    where = segment(ours)
    if rank != 2:
        with pytest.raises(pycomm.Timeout):
            member.backend.allreduce([ours], timeout=SOON).wait()
    member.meet("given up")
    member.form(2, handles)
    assert segment(shared(member)) != where
    check_in(ours)
    member.meet("done")


def until_lost(tensor: torch.Tensor) -> None:
    try:
        while True:
            dist.all_reduce(tensor)
    except pycomm.Error:
        return


@on_members(3)
def test_a_late_rank_writes_nothing_in_the_next_group(rank, size, store):
    """A rank is stopped somewhere in an operation, and wakes up when the others have gone on."""
    member = Member(rank, size, store)
    store.set(f"process {rank}", str(os.getpid()))
    handles = member.handles("all")
    for turn in range(4):
        member.form(10 * turn + 1, handles)
        member.backend.set_timeout(SOON)
        ours = shared(member).fill_(1.0)
        check_in(ours)
        member.meet(f"ready {turn}")
        if rank == 0:
            sleeper = int(store.get("process 2"))
            until = time.monotonic() + 0.02 + 0.013 * turn
            while time.monotonic() < until:
                dist.all_reduce(ours)
            os.kill(sleeper, signal.SIGSTOP)
        until_lost(ours)
        if rank < 2:
            member.form(10 * turn + 2, handles[:2])
            check_in(ours, 5)
            if rank == 0:
                os.kill(sleeper, signal.SIGCONT)
            check_in(ours, 20)
            check_in(shared(member), 5)
        member.meet(f"done {turn}")
