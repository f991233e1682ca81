"""What strangers say to the endpoint of a member, and what one on the path says in its name."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

import pycomm
from pycomm import _C, elastic
from tests.torch.elastic.member import LIMIT, Member, check_sum, on_members
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

SECONDS = 20.0
ID, SECRET, ADDRESSES = 2, 5, 6  # words of a handle


class OnThePath:
    """Somebody on the path to an endpoint, who answers the first callers in its name.

    Args:
        handle: of the endpoint.
        replies: what he says to each of these callers; then he passes on what is said.
    """

    def __init__(self, handle: str, replies: list[list[bytes]]) -> None:
        self.replies = replies
        self._true = endpoint_of(handle)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            caller = self._listener.accept()[0]
            if self.replies:
                replies = self.replies.pop(0)
                with caller, suppress(OSError, EOFError):
                    for reply in replies:
                        caller.recv(72)
                        caller.sendall(reply)
                    caller.recv(72)
                continue
            other = socket.create_connection(self._true, SECONDS)
            for ends in ((caller, other), (other, caller)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)


def endpoint_of(handle: str) -> tuple[str, int]:
    host, _, port = handle.split()[ADDRESSES].split(",")[0].rpartition(":")
    return host.strip("[]"), int(port)


def reply(verdict: int) -> bytes:
    return REPLY.pack(verdict, WIRE, bytes(32))


def through_the_path(member: Member, replies: list[list[bytes]]) -> tuple[list[str], Any]:
    """Return the handles with rank 0's by way of the stranger, and him, on rank 0."""
    handles = member.handles("all")
    path = OnThePath(handles[0], replies) if member.rank == 0 else None
    if path is not None:
        member.store.set("path", path.address)
    words = handles[0].split()
    words[ADDRESSES] = member.store.get("path").decode()
    return [" ".join(words), *handles[1:]], path


@on_members()
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
def test_a_refusal_on_the_path_ends_no_reconfigure(rank, size, store, said):
    """It has proven nothing: the endpoint is asked again."""
    member = Member(rank, size, store)
    handles, path = through_the_path(member, [said] * 4)
    elastic.reconfigure(1, handles, timeout=LIMIT)
    check_sum()
    if path is not None:
        assert path.replies == []
    member.meet("done")


@on_members()
def test_who_refuses_until_the_deadline_is_named(rank, size, store):
    member = Member(rank, size, store)
    handles, _ = through_the_path(member, [[reply(CHALLENGE), reply(WRONG_SECRET)]] * 1000)
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
        return bytes(_C.hmac_sha256(secret, text + self.first + self.challenge))

    def verdict(self, proof: bytes | None = None) -> int:
        self.socket.sendall(proof or self.proof)
        verdict, _, _ = REPLY.unpack(read_exactly(self.socket, REPLY.size))
        return int(verdict)

    def is_thrown_out(self) -> bool:
        with suppress(ConnectionResetError):
            return self.socket.recv(4096) == b""
        return True


@on_members(1)
def test_a_handshake_that_was_heard_opens_nothing(rank, size, store):
    member = Member(rank, size, store)
    (handle,) = member.handles("all")
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


def join(rank: int, size: int, uuid: int = 2) -> bytes:
    return message(1, struct.pack("<qii", uuid, rank, size), bytes(32))


@on_members(1)
@pytest.mark.parametrize(
    "said",
    [
        join(-1, 2),
        join(2, 2),
        join(0, 0),
        join(-(2**31), -(2**31)),
        message(4, struct.pack("<I", 3), b"key"),  # a question of one that has joined nothing
        join(0, 2) + message(4, struct.pack("<I", 2**32 - 1), b"key"),
        join(0, 2) + message(99),
        struct.pack("<I", 2**32 - 1),
    ],
)
def test_a_member_that_lies_is_thrown_out(rank, size, store, said):
    member = Member(rank, size, store)
    (handle,) = member.handles("all")
    member.form(1, [handle])
    liar = Stranger(handle)
    assert liar.verdict() == WELCOME
    liar.socket.sendall(said)
    assert liar.is_thrown_out()
    asks = Stranger(handle)
    assert asks.verdict() == WELCOME
    asks.socket.sendall(message(6, struct.pack("<q", 1)))
    (length,) = struct.unpack("<I", read_exactly(asks.socket, 4))
    assert read_exactly(asks.socket, length)[:2] == bytes([10, 2])  # an answer: formed
    member.form(2, [handle])
    check_sum()
