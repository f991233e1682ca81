"""A group whose members change stays the same object: pycomm.elastic, on every torch."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import _test, elastic
from tests.faults.injection.case import ELASTIC, FAULTS_OF_ELASTIC, draw
from tests.faults.injection.play import breaches, play
from tests.torch.elastic.member import LIMIT, Member, on_members
from tests.torch.harness import check_sum
from tests.torch.pool import on_ranks
from tests.transports.proxy import Proxy
from tests.transports.wire_peer import (
    CHALLENGE,
    CONTROL,
    REPLY,
    WELCOME,
    WIRE,
    WRONG_SECRET,
    WRONG_VERSION,
    hello,
    read_exactly,
)


@on_members(formed=False)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_those_of_the_list(rank, size, member, handles, transport):
    with pytest.raises(pycomm.Error, match="call reconfigure"):
        dist.barrier()
    assert len(set(handles)) == size
    member.form(1, handles)
    check_sum()
    numbers = torch.zeros(5)
    around = [
        dist.isend(torch.full((5,), float(rank)), (rank + 1) % size),
        dist.irecv(numbers, (rank - 1) % size),
    ]
    for work in around:
        work.wait()
    assert numbers.tolist() == [float((rank - 1) % size)] * 5
    assert handles == member.handles("again"), "a handle does not change"
    member.form(2, handles[::-1])  # the ranks are those of the list
    assert dist.get_rank() == size - 1 - rank
    check_sum()


@on_members(4, formed=False)
@pytest.mark.parametrize(
    "groups",
    [
        ("0|1|2|3", "0123", "0|1|2|3"),
        ("01", "0123"),
        ("01|23", "0123"),
        *(("012", left) for left in ("12", "02", "01")),
    ],
    ids="-".join,
)
def test_members_come_and_go(rank, member, handles, groups):
    for step, text in enumerate(groups):
        for members in text.split("|"):
            if str(rank) in members:
                member.form(10 * step + int(members[0]), [handles[int(r)] for r in members])
                assert dist.get_rank() == members.index(str(rank))
                check_sum()
    member.meet("done")


@on_ranks(3, backend=None)
@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has none before 2.14")
def test_reconfigure_of_torch_forms_the_same_groups(rank, size, store):
    """As torch's own test_c10d_fault_tolerance.py does: by its functions and its option."""
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=size, timeout=LIMIT, enable_reconfigure=True
    )
    backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
    assert dist._supports_reconfigure()
    assert backend.supports_reconfigure

    def handles(topic: str) -> list[str]:
        store.set(f"{topic} {rank}", dist._get_reconfigure_handle())
        return [store.get(f"{topic} {r}").decode() for r in range(size)]

    def form(uuid: int, members: list[str]) -> None:
        dist._reconfigure(uuid, members, timeout=LIMIT).wait()
        assert dist.get_world_size() == len(members)
        check_sum()

    everybody = handles("all")
    form(1, everybody)
    backend.abort()
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    form(2, handles("aborted"))
    form(10 + rank, [dist._get_reconfigure_handle()])  # each alone
    with pytest.raises(RuntimeError, match="already used"):
        dist._reconfigure(10 + rank, [dist._get_reconfigure_handle()], timeout=LIMIT).wait()
    form(3, handles("again")[::-1])
    assert dist.get_rank() == size - 1 - rank
    if rank != 1:
        form(4, [everybody[0], everybody[2]])
    handles("done")


@on_members(3)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_group_that_was_aborted_is_formed_anew(member, handles, transport):
    member.meet("formed")
    member.backend.abort()
    with pytest.raises(pycomm.Error, match="aborted"):
        dist.barrier()
    member.meet("over")
    member.form(2, handles)
    check_sum()


@on_members(4)
def test_a_change_ends_what_is_under_way(rank, member, handles):
    """A rank waits in an operation that the others never begin."""
    waits = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    member.meet("under way")
    member.form(2, handles)
    if waits is not None:
        with pytest.raises(pycomm.Error, match="reconfigures the group in the middle"):
            waits.wait()
    check_sum()


# ------------------------------------------------------------------ wrong arguments


def refused(member: Member, uuid: int, handles: list[str], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        elastic.reconfigure(uuid, handles, timeout=LIMIT)


def used_by_all(member: Member, handles: list[str]) -> None:
    refused(member, 1, handles, RuntimeError, "already used")


def used_by_one(member: Member, handles: list[str]) -> None:
    if member.rank == 1:
        member.form(7, [elastic.handle()])
        refused(member, 7, handles, pycomm.Error, "already used by this process")
    else:
        refused(member, 7, handles, pycomm.Error, "already used by rank 1")


def not_listed(member: Member, handles: list[str]) -> None:
    if member.rank == 2:
        refused(member, 7, handles[:2], pycomm.Error, "not in the list of 2")
    else:
        member.form(7, handles[:2])


def other_lists(member: Member, handles: list[str]) -> None:
    for uuid, other in ((7, handles[:2]), (9, handles[::-1])):
        given = other if member.rank == 0 else handles
        refused(member, uuid, given, pycomm.WireMismatch, "different handles")
        member.meet(f"refused {uuid}")


def nonsense(member: Member, handles: list[str]) -> None:
    words = handles[1].split()
    words[1] = "0123456789abcdef"
    for given, text in (
        ([*handles, handles[0]], "that of rank 0, too"),
        ([], "empty"),
        ([handles[0], " ".join(words), *handles[2:]], "another group"),
        *(
            ([*handles, wrong], "no handle of a pycomm group")
            for wrong in ("", "localhost:4711", handles[0] + " more", handles[0][:40])
        ),
    ):
        refused(member, 7, given, pycomm.Error, text)
    for uuid in (-1, 2**63):
        refused(member, uuid, handles, ValueError, "uuid")
    with pytest.raises(TypeError, match="one text"):
        elastic.reconfigure(7, handles[0])


def wrong_secret(member: Member, handles: list[str]) -> None:
    """The handle of a process that has another secret now, as after a restart at this port."""
    words = handles[0].split()
    words[5] = "0" * len(words[5])
    stale = [" ".join(words), *handles[1:]]
    if member.rank == 0:  # it is the one whose handle is out of date
        refused(member, 7, stale, pycomm.Error, "has given up: .* is not the one of the handle")
    else:  # who answers there may be somebody on the path, and is asked again until the deadline
        with pytest.raises(pycomm.Error, match="is not the one of the handle"):
            elastic.reconfigure(7, stale, timeout=timedelta(seconds=1))


@on_members(3)
@pytest.mark.parametrize(
    "act", [used_by_all, used_by_one, not_listed, other_lists, nonsense, wrong_secret]
)
def test_a_mistake_is_named_on_all_ranks(member, handles, act):
    act(member, handles)
    member.meet("seen")
    member.form(8, handles)
    check_sum()


@on_members(3, formed=False, dies={2})
def test_a_dead_handle_is_named_early(rank, member, handles):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLost, match=r"rank 2 .* is gone") as caught:
        elastic.reconfigure(1, handles, timeout=LIMIT)
    assert caught.value.rank == 2
    member.form(2, handles[:2])
    check_sum()


@on_members(3, formed=False)
def test_a_member_that_does_not_come_is_named(rank, member, handles):
    if rank != 1:
        with pytest.raises(pycomm.Timeout, match=r"did not come.* 1"):
            elastic.reconfigure(1, handles, timeout=timedelta(seconds=1))
    member.meet("seen")
    member.form(2, handles)
    check_sum()


@on_members(4, formed=False)
def test_a_stopped_first_member_is_named(rank, store, member, handles):
    """The others meet at its endpoint, and wait for its answers no longer than for a member."""
    store.set(f"process {rank}", str(os.getpid()))
    if rank == 1:
        lender = int(store.get("process 0"))
        threading.Timer(0.5, os.kill, (lender, signal.SIGSTOP)).start()
    if rank != 3:  # so that the others wait for it
        with pytest.raises(
            pycomm.Timeout, match="did not come" if rank == 0 else "rank 0 does not"
        ):
            elastic.reconfigure(1, handles, timeout=timedelta(seconds=1))
        store.set(f"raised {rank}", "")
    if rank == 1:
        store.get("raised 2")
        os.kill(lender, signal.SIGCONT)
    member.meet("seen")
    member.form(2, handles)
    check_sum()


# ---------------------------------------------------------------------------------------- strangers
# What strangers say to the endpoint of a member, and what one on the path says in its name.


SECONDS = 20.0
ID, SECRET, ADDRESSES = 2, 5, 6  # words of a handle


class OnThePath(Proxy):
    """Somebody on the path to an endpoint, who answers the first callers in its name.

    Args:
        handle: of the endpoint.
        replies: what he says to each of these callers; then he passes on what is said.
    """

    def __init__(self, handle: str, replies: list[list[bytes]]) -> None:
        self.replies = replies
        super().__init__(endpoint_of(handle))

    def _accept(self) -> None:
        while self.replies:
            with self.listener.accept()[0] as caller, suppress(OSError):
                for reply in self.replies.pop(0):
                    caller.recv(72)
                    caller.sendall(reply)
                caller.recv(72)
        super()._accept()


def endpoint_of(handle: str) -> tuple[str, int]:
    host, _, port = handle.split()[ADDRESSES].split(",")[0].rpartition(":")
    return host.strip("[]"), int(port)


def reply(verdict: int) -> bytes:
    return REPLY.pack(verdict, WIRE, bytes(32))


def through_the_path(
    member: Member, handles: list[str], replies: list[list[bytes]]
) -> tuple[list[str], Any]:
    """Return the handles with rank 0's by way of the stranger, and him, on rank 0."""
    path = OnThePath(handles[0], replies) if member.rank == 0 else None
    if path is not None:
        member.store.set("path", "{}:{}".format(*path.address))
    words = handles[0].split()
    words[ADDRESSES] = member.store.get("path").decode()
    return [" ".join(words), *handles[1:]], path


@on_members(formed=False)
@pytest.mark.parametrize(
    "said",
    [
        [reply(CHALLENGE), reply(WRONG_SECRET)],
        [reply(CHALLENGE), reply(WELCOME)],
        [reply(WRONG_VERSION)],
        [b"\0" * REPLY.size],
        [],
    ],
)
def test_a_refusal_on_the_path_ends_no_reconfigure(member, handles, said):
    """It has proven nothing: the endpoint is asked again."""
    handles, path = through_the_path(member, handles, [said] * 4)
    elastic.reconfigure(1, handles, timeout=LIMIT)
    check_sum()
    if path is not None:
        assert path.replies == []
    member.meet("done")


@on_members(formed=False)
def test_who_refuses_until_the_deadline_is_named(rank, member, handles):
    said = [reply(CHALLENGE), reply(WRONG_SECRET)]
    handles, _ = through_the_path(member, handles, [said] * 1000)
    if rank == 1:
        with pytest.raises(pycomm.Error, match=r"not the one of the handle .*refused our secret"):
            elastic.reconfigure(1, handles, timeout=timedelta(seconds=1))
    member.meet("refused")


class Stranger:
    """A connection to an endpoint whose secret is known: a member that lies."""

    def __init__(self, handle: str, secret: bytes | None = None) -> None:
        words = handle.split()
        self.label = f"endpoint {words[ID]}"
        self.socket = socket.create_connection(endpoint_of(handle), SECONDS)
        self.first = hello(CONTROL)
        self.socket.sendall(self.first)
        verdict, _, self.challenge = REPLY.unpack(read_exactly(self.socket, REPLY.size))
        assert verdict == CHALLENGE
        self.proof = self._proof(secret or words[SECRET].encode())

    def _proof(self, secret: bytes) -> bytes:
        text = f"pycomm tcp connect\0{len(self.label)}:{self.label}".encode()
        return bytes(_test.hmac_sha256(secret, text + self.first + self.challenge))

    def verdict(self, proof: bytes | None = None) -> int:
        self.socket.sendall(proof or self.proof)
        verdict, _, _ = REPLY.unpack(read_exactly(self.socket, REPLY.size))
        return int(verdict)

    def is_thrown_out(self) -> bool:
        with suppress(ConnectionResetError):
            return self.socket.recv(4096) == b""
        return True


@on_members(1, formed=False)
def test_a_handshake_that_was_heard_opens_nothing(member, handles):
    (handle,) = handles
    honest = Stranger(handle)
    assert honest.verdict() == WELCOME
    assert Stranger(handle).verdict(honest.proof) == WRONG_SECRET  # replayed: the nonce is new
    assert Stranger(handle, os.urandom(32).hex().encode()).verdict() == WRONG_SECRET
    elsewhere = handle.split()
    elsewhere[ID] = "0" * 16
    assert Stranger(" ".join(elsewhere)).verdict() == WRONG_SECRET  # of another endpoint
    member.form(1, [handle])


def message(kind: int, *parts: bytes) -> bytes:
    content = bytes([kind]) + b"".join(parts)
    return struct.pack("<I", len(content)) + content


JOIN = message(1, struct.pack("<q", 2), bytes(32))


@on_members(1)
@pytest.mark.parametrize(
    "said",
    [
        message(4, struct.pack("<I", 3), b"key"),  # a question of one that has joined nothing
        JOIN + message(4, struct.pack("<I", 2**32 - 1), b"key"),
        JOIN + message(99),
        message(1, bytes(20)),  # cut short
        struct.pack("<I", 2**32 - 1),
    ],
)
def test_a_member_that_lies_is_thrown_out(member, handles, said):
    (handle,) = handles
    liar = Stranger(handle)
    assert liar.verdict() == WELCOME
    liar.socket.sendall(said)
    assert liar.is_thrown_out()
    asks = Stranger(handle)
    assert asks.verdict() == WELCOME
    asks.socket.sendall(message(5, struct.pack("<q", 1)))
    (length,) = struct.unpack("<I", read_exactly(asks.socket, 4))
    assert read_exactly(asks.socket, length)[:2] == bytes([7, 2])  # an answer: formed
    member.form(2, [handle])
    check_sum()


# ------------------------------------------------------------------------------------ shared memory
# Tensors in memory that ranks of a host share, such as buckets of DDP, outlive its members.


NUMEL = 300_007
SOON = timedelta(seconds=0.5)


def shared(member: Member) -> torch.Tensor:
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    return member.backend.allocate_tensor(NUMEL, **options)


def check_in(tensor: torch.Tensor, times: int = 3) -> None:
    """Sum whole numbers in this memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    steps = torch.arange(NUMEL) % 1000
    for turn in range(times):
        tensor.copy_(steps * (rank + 1) + turn)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, (steps * (size * (size + 1) // 2) + turn * size).float())


@on_members(3, formed=False)
def test_memory_of_a_former_group_is_summed(rank, member, handles):
    if rank < 2:
        member.form(1, handles[:2])
        ours = shared(member)
        check_in(ours)
    member.form(2, handles)
    check_in(ours if rank < 2 else shared(member))
    check_in(shared(member))
    check_sum()


def reduce_until_lost(tensor: torch.Tensor) -> None:
    try:
        while True:
            dist.all_reduce(tensor)
    except pycomm.Error:
        return


@on_members(3, formed=False)
def test_a_late_rank_writes_nothing_in_the_next_group(rank, store, member, handles):
    """A rank is stopped somewhere in an operation, and wakes up when the others have gone on."""
    store.set(f"process {rank}", str(os.getpid()))
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
        reduce_until_lost(ours)
        if rank < 2:
            member.form(10 * turn + 2, handles[:2])
            check_in(ours, 5)
            if rank == 0:
                os.kill(sleeper, signal.SIGCONT)
            check_in(ours, 20)
            check_in(shared(member), 5)
        member.meet(f"done {turn}")


# ---------------------------------------------------------------------------------- random faults
# A sample of the random faults while members change; `make soak` plays more of them.


@pytest.mark.parametrize("phase", ELASTIC)
@pytest.mark.parametrize("fault", FAULTS_OF_ELASTIC)
def test_a_fault_while_members_change_is_told(phase, fault):
    case = draw(7, 2, transports=["shm", "tcp"], faults=[fault], phases=[phase])
    assert case.phase == phase
    assert breaches(play(case)) == [], str(case)
