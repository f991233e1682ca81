"""The TCP handshake against a handwritten peer: unknown peers do not stall a set-up, and a peer
that cannot prove the secret never joins."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest

import pycomm.errors
from pycomm import _C, _test
from tests.transports.ranks import SECONDS
from tests.transports.wire_peer import (
    CHALLENGE,
    GROUP,
    KEY,
    REPLY,
    WELCOME,
    WRONG_SECRET,
    WRONG_SHAPE,
    WRONG_TLS,
    WRONG_VERSION,
    hello,
    read_exactly,
)

STRANGERS = {
    "silent": b"",
    "http": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "half a hello": hello()[:40],
    "garbage": random.Random(1).randbytes(100_000),
    "hello and a wrong proof": hello() + bytes(32),
    "hello and half a proof": hello() + bytes(16),
}


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "goes"])
@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_do_not_stall_a_set_up(rank_0, what, stays):
    strangers = []
    for _ in range(20):
        stranger = socket.create_connection(rank_0.address, SECONDS)
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.send(STRANGERS[what])
        strangers.append(stranger)
        if not stays:
            stranger.close()
    start = time.monotonic()
    rank_0.come()
    assert time.monotonic() - start < 5
    assert rank_0.transport.reaches(1)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("change", "key", "verdict"),
    [
        ({}, b"another", WRONG_SECRET),
        ({"version": 1}, KEY, WRONG_VERSION),
        ({"size": 3}, KEY, WRONG_SHAPE),
        ({"sockets": 2}, KEY, WRONG_SHAPE),
        ({"rank": 0}, KEY, WRONG_SHAPE),
        ({"rank": 2}, KEY, WRONG_SHAPE),
        ({"target": 1}, KEY, WRONG_SHAPE),
        ({"lane": 2}, KEY, WRONG_SHAPE),
        ({"socket": 1}, KEY, WRONG_SHAPE),
        ({"tls": 1}, KEY, WRONG_TLS),
    ],
)
def test_refusal_says_why(rank_0, change, key, verdict):
    rank_0.publish_card()
    connection, got, body = rank_0.join(hello(**change), key)
    assert got == verdict
    assert body == bytes(32) or verdict == WRONG_VERSION, "a refusal proves nothing"
    assert connection.recv(1) == b""
    connection.close()


def test_replayed_handshake_is_refused(rank_0):
    rank_0.publish_card()
    first = hello()
    connection = socket.create_connection(rank_0.address, SECONDS)
    connection.sendall(first)
    _, _, challenge = REPLY.unpack(read_exactly(connection, REPLY.size))
    recorded = rank_0.proof("connect", first, challenge)
    connection.close()
    with socket.create_connection(rank_0.address, SECONDS) as replay:
        replay.sendall(first)
        read_exactly(replay, REPLY.size)
        replay.sendall(recorded)
        assert REPLY.unpack(read_exactly(replay, REPLY.size))[0] == WRONG_SECRET


@pytest.mark.parametrize(
    ("replies", "text"),
    [
        ([(CHALLENGE, bytes(32)), (WELCOME, bytes(32))], "does not know our secret"),
        ([(WELCOME, bytes(32))], "does not speak this protocol"),
        ([(77, bytes(32))], "does not speak this protocol"),
        ([(WRONG_VERSION, bytes(32))], "install the same pycomm"),
    ],
)
def test_false_listener_is_asked_again_until_the_deadline(replies, text):
    """It has proven nothing, so its refusal ends no set-up; the error says what it answered."""
    store = _C.Store.local()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    answered = []

    def pretend():
        store.set(f"{GROUP}/tcp-host/0", store.get(f"{GROUP}/tcp-host/1", SECONDS))
        store.set(f"{GROUP}/tcp-card/0", f"127.0.0.1:{port} a secret")
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                with listener.accept()[0] as connection:
                    for verdict, body in replies:
                        connection.recv(72)
                        connection.sendall(REPLY.pack(verdict, 3, body))
                    connection.recv(72)
                    answered.append(verdict)

    false = threading.Thread(target=pretend)
    false.start()
    with pytest.raises(pycomm.errors.Timeout, match=text):
        _test.Transport("tcp", store, GROUP, 1, 2, timeout=0.7, sockets=1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    false.join()
    assert len(answered) > 1


def test_listener_that_is_gone_is_a_lost_peer():
    store = _C.Store.local()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def pretend():
        store.set(f"{GROUP}/tcp-host/0", store.get(f"{GROUP}/tcp-host/1", SECONDS))
        store.set(f"{GROUP}/tcp-card/0", f"127.0.0.1:{port} a secret")

    false = threading.Thread(target=pretend)
    false.start()
    with pytest.raises(pycomm.errors.PeerLost, match=rf"rank 0 \(127.0.0.1:{port}\)") as lost:
        _test.Transport("tcp", store, GROUP, 1, 2, timeout=SECONDS, sockets=1)
    assert lost.value.rank == 0
    false.join()
