"""The TCP transport against a peer written by hand from the wire format: garbage is refused,
strangers do not stall a set-up, and every way to split the bytes of a frame works."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import struct
import threading
import time

import pytest

import pycomm.errors
from pycomm import _C
from tests.transports.ranks import SECONDS, Rank, pattern, tag, threads

GROUP = "wire"
MIB = 1 << 20
SECRET = b"the secret"
HELLO = struct.Struct("<8s4I4H2I32s")
REPLY = struct.Struct("<2I32s")
HEADER = struct.Struct("<I2H3Q2I64sQ3I")  # the checksum follows, here and there
NOTICE = struct.Struct("<3IiI1000s")
MAGIC, CONTROL = b"pycomm\r\n", 0xFFFF
CHALLENGE, WELCOME, WRONG_SECRET, WRONG_VERSION, WRONG_SHAPE, WRONG_TLS = range(1, 7)


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def hello(lane: int = 0, **change) -> bytes:
    values = dict(
        magic=MAGIC,
        version=3,
        size=2,
        rank=1,
        target=0,
        lane=lane,
        socket=0,
        sockets=1,
        tls=0,
        generation=0,
        unused=0,
        nonce=os.urandom(32),
    )
    return HELLO.pack(*{**values, **change}.values())


def proof(role: str, hello: bytes, challenge: bytes, secret: bytes = SECRET) -> bytes:
    text = f"pycomm tcp {role}\0{len(GROUP)}:{GROUP}".encode()
    return _C.hmac_sha256(secret, text + hello + challenge)


def join(address: tuple[str, int], first: bytes, secret: bytes = SECRET):
    """Goes through a handshake; returns the connection, and verdict and body of the last reply."""
    connection = socket.create_connection(address, SECONDS)
    connection.sendall(first)
    verdict, _, challenge = REPLY.unpack(read_exactly(connection, REPLY.size))
    if verdict != CHALLENGE:
        return connection, verdict, b""
    connection.sendall(proof("connect", first, challenge, secret))
    verdict, _, body = REPLY.unpack(read_exactly(connection, REPLY.size))
    if verdict == WELCOME:
        assert body == proof("listen", first, challenge)
    return connection, verdict, body


def frame(
    payload: bytes,
    *,
    message: int = 1,
    offset: int = 0,
    size: int | None = None,
    tag_hash: int = 0,
    lane: int = 0,
    version: int = 3,
    magic: int = 0x4D435950,
    checks: int = 1,
) -> bytes:
    whole = len(payload) if size is None else size
    ids = magic, version, lane, message, offset, whole, len(payload), tag_hash
    head = HEADER.pack(*ids, bytes(64), 0, checks, _C.crc32c(payload) if checks else 0, 0)
    return head + struct.pack("<I", _C.crc32c(head)) + payload


def goodbye() -> bytes:
    notice = NOTICE.pack(0x4E435950, 2, 0, -1, 0, bytes(1000))
    return notice + struct.pack("<I", _C.crc32c(notice))


class RankZero:
    """Rank 0 of two, whose other rank is played by the test."""

    def __init__(self, **options) -> None:
        self.options = dict(timeout=SECONDS, sockets=1, secret=SECRET.decode()) | options
        self.store = _C.Store.local()
        self.transport = None
        self.error: BaseException | None = None
        self.connections: dict[tuple[int, int], socket.socket] = {}
        self.thread = threading.Thread(target=self.set_up)
        self.thread.start()
        # We claim to be on the same host, and nobody connects to us.
        self.store.set(f"{GROUP}/tcp-host/1", self.store.get(f"{GROUP}/tcp-host/0", SECONDS))
        card = self.store.get(f"{GROUP}/tcp-card/0", SECONDS).decode()
        ip, port = card.split(" ")[0].rsplit(":", 1)
        self.address = ip, int(port)

    def leave(self) -> None:
        """Rank 1 is gone, so that rank 0 waits for no answer to its goodbye."""
        for connection in self.connections.values():
            connection.close()
        if self.transport is not None:
            self.transport.close()

    def set_up(self) -> None:
        try:
            self.transport = _C.Transport("tcp", self.store, GROUP, 0, 2, **self.options)
        except BaseException as error:
            self.error = error

    def come(self) -> dict[tuple[int, int], socket.socket]:
        """Rank 1 comes: returns its connections by lane and socket."""
        self.store.set(f"{GROUP}/tcp-card/1", "127.0.0.1:1")
        sockets = self.options["sockets"]
        for lane, number in [*itertools.product((0, 1), range(sockets)), (CONTROL, 0)]:
            first = hello(lane, socket=number, sockets=sockets)
            self.connections[lane, number], verdict, _ = join(self.address, first)
            assert verdict == WELCOME
        self.thread.join()
        if self.error:
            raise self.error
        return self.connections

    def expect(self, size: int) -> bytes:
        me = Rank(0, 2, self.transport)
        goal, result = me.recv(1, size, tag())
        me.wait(goal)
        return result()


@pytest.fixture
def rank_0():
    rank = RankZero()
    yield rank
    if rank.thread.is_alive():
        with contextlib.suppress(OSError, EOFError):
            rank.come()
    rank.thread.join()
    rank.leave()


@pytest.fixture
def our_hash(rank_0):
    """The hash of the tag that `expect` uses, as the transport itself sends it."""
    connections = rank_0.come()
    me = Rank(0, 2, rank_0.transport)
    me.wait(me.send(1, b"", tag()))
    header = read_exactly(connections[0, 0], HEADER.size + 4)
    assert _C.crc32c(header[:-4]) == struct.unpack("<I", header[-4:])[0]
    return HEADER.unpack(header[:-4])[7]


# ------------------------------------------------------------------------------ strangers


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
    connections = rank_0.come()
    assert time.monotonic() - start < 5
    assert rank_0.transport.reaches(1)
    for each in [*strangers, *connections.values()]:
        each.close()


def test_flood_of_connections_does_not_stall_a_set_up(rank_0):
    flood = [socket.create_connection(rank_0.address, SECONDS) for _ in range(600)]
    connections = rank_0.come()
    for each in [*flood, *connections.values()]:
        each.close()


@pytest.mark.parametrize(
    ("change", "secret", "verdict"),
    [
        ({}, b"another", WRONG_SECRET),
        ({"version": 1}, SECRET, WRONG_VERSION),
        ({"size": 3}, SECRET, WRONG_SHAPE),
        ({"sockets": 2}, SECRET, WRONG_SHAPE),
        ({"rank": 0}, SECRET, WRONG_SHAPE),
        ({"rank": 2}, SECRET, WRONG_SHAPE),
        ({"target": 1}, SECRET, WRONG_SHAPE),
        ({"lane": 2}, SECRET, WRONG_SHAPE),
        ({"socket": 1}, SECRET, WRONG_SHAPE),
        ({"tls": 1}, SECRET, WRONG_TLS),
    ],
)
def test_refusal_says_why(rank_0, change, secret, verdict):
    rank_0.store.set(f"{GROUP}/tcp-card/1", "127.0.0.1:1")
    connection, got, body = join(rank_0.address, hello(**change), secret)
    assert got == verdict
    assert body == bytes(32) or verdict == WRONG_VERSION, "a refusal proves nothing"
    assert connection.recv(1) == b""
    connection.close()


def test_replayed_handshake_is_refused(rank_0):
    rank_0.store.set(f"{GROUP}/tcp-card/1", "127.0.0.1:1")
    first = hello()
    connection = socket.create_connection(rank_0.address, SECONDS)
    connection.sendall(first)
    _, _, challenge = REPLY.unpack(read_exactly(connection, REPLY.size))
    recorded = proof("connect", first, challenge)
    connection.close()
    with socket.create_connection(rank_0.address, SECONDS) as replay:
        replay.sendall(first)
        read_exactly(replay, REPLY.size)
        replay.sendall(recorded)
        assert REPLY.unpack(read_exactly(replay, REPLY.size))[0] == WRONG_SECRET


def test_mutated_handshakes_never_join(rank_0):
    chance = random.Random(3)
    for _ in range(200):
        first = hello(chance.choice([0, 1, CONTROL]))
        with socket.create_connection(rank_0.address, SECONDS) as connection:
            # Rank 0 answers only once it knows where rank 1 is: the proof cannot be right.
            data = bytearray(first + proof("connect", first, bytes(32)))
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            connection.sendall(data[: chance.randrange(len(data) + 1)])
    for connection in rank_0.come().values():
        connection.close()
    assert rank_0.transport.reaches(1)


@pytest.mark.parametrize(
    ("replies", "text"),
    [
        ([(CHALLENGE, bytes(32)), (WELCOME, bytes(32))], "does not know our secret"),
        ([(WELCOME, bytes(32))], "does not speak this protocol"),
        ([(77, bytes(32))], "does not speak this protocol"),
        ([(WRONG_VERSION, bytes(32))], "install the same pycomm"),
    ],
)
def test_false_listener_is_refused(replies, text):
    store = _C.Store.local()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def pretend():
        store.set(f"{GROUP}/tcp-host/0", store.get(f"{GROUP}/tcp-host/1", SECONDS))
        store.set(f"{GROUP}/tcp-card/0", f"127.0.0.1:{port}")
        connection = listener.accept()[0]
        for verdict, body in replies:
            connection.recv(64)
            connection.sendall(REPLY.pack(verdict, 3, body))
        connection.recv(64)
        connection.close()

    false = threading.Thread(target=pretend)
    false.start()
    with pytest.raises(pycomm.errors.Error, match=text):
        _C.Transport("tcp", store, GROUP, 1, 2, timeout=5, sockets=1, secret="s")
    false.join()
    listener.close()


def test_listener_that_is_gone_is_a_lost_peer():
    store = _C.Store.local()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def pretend():
        store.set(f"{GROUP}/tcp-host/0", store.get(f"{GROUP}/tcp-host/1", SECONDS))
        store.set(f"{GROUP}/tcp-card/0", f"127.0.0.1:{port}")

    false = threading.Thread(target=pretend)
    false.start()
    with pytest.raises(pycomm.errors.PeerLost, match=rf"rank 0 \(127.0.0.1:{port}\)") as lost:
        _C.Transport("tcp", store, GROUP, 1, 2, timeout=SECONDS, sockets=1, secret="s")
    assert lost.value.rank == 0
    false.join()


# ------------------------------------------------------------------------------ frames


@pytest.mark.parametrize("step", [1, 50, 128, 129, 1000])
def test_bytes_arrive_in_any_pieces(rank_0, our_hash, step):
    payload = pattern(3000, 1)
    data = frame(payload[:1000], size=3000, tag_hash=our_hash)
    data += frame(payload[1000:], offset=1000, size=3000, tag_hash=our_hash)

    def drip():
        for i in range(0, len(data), step):
            rank_0.connections[0, 0].sendall(data[i : i + step])

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert rank_0.expect(3000) == payload
    dripping.join()


def test_several_messages_arrive_in_one_piece(rank_0, our_hash):
    data = b"".join(
        frame(pattern(n, i), message=i + 1, tag_hash=our_hash) for i, n in enumerate([5, 0, 700, 1])
    )
    rank_0.connections[0, 0].sendall(data)
    assert [rank_0.expect(n) for n in [5, 0, 700, 1]] == [
        pattern(n, i) for i, n in enumerate([5, 0, 700, 1])
    ]


def flipped(data: bytes, byte: int) -> bytes:
    return data[:byte] + bytes([data[byte] ^ 0x10]) + data[byte + 1 :]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda h: frame(b"1234", tag_hash=h, magic=1), "no frame starts"),
        (lambda h: frame(b"1234", tag_hash=h, version=9), "version 9"),
        (lambda h: frame(b"1234", tag_hash=h, lane=1), "wrong lane"),
        (lambda h: frame(b"1234", tag_hash=h, message=0), "no message number"),
        (lambda h: frame(b"1234", tag_hash=h, offset=1, size=4), "does not fit"),
        (lambda h: frame(b"1234", tag_hash=h, offset=2**64 - 2, size=4), "does not fit"),
        (lambda h: frame(b"", tag_hash=h, size=4), "does not fit"),
        (
            lambda h: (
                frame(b"12", size=4, tag_hash=h) + frame(b"123", offset=1, size=4, tag_hash=h)
            ),
            "came twice",
        ),
        (lambda h: frame(b"12345", tag_hash=h), "4 bytes of all_reduce #1 .* 5 bytes of none"),
        (lambda h: frame(b"1234", tag_hash=h ^ 1), "4 bytes of all_reduce #1 .* 4 bytes of none"),
    ],
)
def test_false_frame_is_described(rank_0, our_hash, make, text):
    rank_0.connections[0, 0].sendall(make(our_hash))
    with pytest.raises(pycomm.errors.Error, match=f"rank 0 .*{text}"):
        rank_0.expect(4)


@pytest.mark.parametrize("byte", range(0, 128, 9))
def test_damaged_header_is_found(rank_0, our_hash, byte):
    rank_0.connections[0, 0].sendall(flipped(frame(b"1234", tag_hash=our_hash), byte))
    with pytest.raises(pycomm.errors.Error, match=r"no frame starts|checksum"):
        rank_0.expect(4)


@pytest.mark.parametrize("byte", [0, 1, 2000, 2999])
@pytest.mark.parametrize("cut", [3000, 1000], ids=["one frame", "two frames"])
def test_damaged_payload_is_found_and_named(rank_0, our_hash, byte, cut):
    payload = pattern(3000, 1)
    damaged = flipped(payload, byte)
    data = b""
    for begin in range(0, 3000, cut):
        good = frame(payload[begin : begin + cut], offset=begin, size=3000, tag_hash=our_hash)
        data += good[:128] + damaged[begin : begin + cut]
    rank_0.connections[0, 0].sendall(data)
    begin = byte // cut * cut
    with pytest.raises(
        pycomm.errors.Error,
        match=rf"rank 0 .* from rank 1 for all_reduce #1 .*bytes {begin} to {begin + cut} of 3000",
    ):
        rank_0.expect(3000)


def test_payload_that_is_not_checked_is_taken_as_it_is(rank_0, our_hash):
    rank_0.connections[0, 0].sendall(frame(b"1234", tag_hash=our_hash, checks=0))
    assert rank_0.expect(4) == b"1234"


@pytest.mark.parametrize("checked", [True, False])
def test_sender_says_what_is_checked(checked):
    def body(me):
        return me.exchange({1 - me.rank: pattern(3 * MIB, me.rank)}, tag())

    got = threads(
        2, body, options=lambda rank: {"checksum": "payload" if checked or rank == 0 else "header"}
    )
    assert got == [{1: pattern(3 * MIB, 1)}, {0: pattern(3 * MIB, 0)}]


def test_unknown_checksums_are_refused():
    with pytest.raises(pycomm.errors.Error, match="want auto, payload or header"):
        _C.Transport("tcp", _C.Store.local(), GROUP, 0, 2, checksum="md5")


OUTER = next((ip for name, ip in _C.interfaces() if name != "lo" and ":" not in ip), None)


@pytest.mark.parametrize(
    ("checksum", "interface", "checks"),
    [("auto", "lo", 0), ("payload", "lo", 1), ("header", "lo", 0)]
    + [("auto", OUTER, 1), ("header", OUTER, 0)] * (OUTER is not None),
)
def test_payloads_that_leave_the_host_are_checked(checksum, interface, checks):
    rank_0 = RankZero(checksum=checksum, interface=interface)
    connections = rank_0.come()
    me = Rank(0, 2, rank_0.transport)
    me.wait(me.send(1, b"payload", tag()))
    assert HEADER.unpack(read_exactly(connections[0, 0], HEADER.size))[10] == checks
    rank_0.leave()


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_never_pass_for_a_frame(rank_0, our_hash, seed):
    chance = random.Random(seed)
    data = bytearray(frame(b"1234", tag_hash=our_hash))
    place = chance.randrange(128)
    data[place : place + 16] = chance.randbytes(min(16, 128 - place))
    rank_0.connections[0, 0].sendall(data)
    with pytest.raises(pycomm.errors.Error, match=r"no frame starts|checksum"):
        rank_0.expect(4)


@pytest.mark.parametrize("cut", [1, 127, 128, 131])
def test_torn_frame_is_a_lost_peer(rank_0, our_hash, cut):
    rank_0.connections[0, 0].sendall(frame(b"1234", tag_hash=our_hash)[:cut])
    for connection in rank_0.connections.values():
        connection.close()
    with pytest.raises(pycomm.errors.PeerLost) as lost:
        rank_0.expect(4)
    assert lost.value.rank == 1


def test_what_a_rank_that_has_left_cannot_send_any_more_is_not_waited_for():
    """Of its two connections one is cut, the other has come to the next message already."""
    rank = RankZero(sockets=2)
    connections = rank.come()
    connections[0, 1].sendall(frame(b"1234", message=2))
    connections[CONTROL, 0].sendall(goodbye())
    connections[0, 0].close()
    try:
        with pytest.raises(pycomm.errors.PeerLost, match=r"rank 1 .* has left the group"):
            rank.expect(4)
    finally:
        rank.leave()


def test_garbage_on_the_control_connection_is_a_lost_peer(rank_0, our_hash):
    rank_0.connections[CONTROL, 0].sendall(random.Random(2).randbytes(1024))
    with pytest.raises(pycomm.errors.PeerLost):
        rank_0.expect(4)
