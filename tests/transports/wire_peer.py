"""A handwritten peer of the TCP transport that follows the wire format."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import socket
import struct
import threading
from contextlib import suppress

from pycomm import _C, _test
from tests.transports.ranks import SECONDS, Rank, tag

GROUP = "wire"
MIB = 1 << 20
SECRET = b"the secret of the tests"
# What stands for the secret: csrc/transports/seal.h.
KEY = hashlib.scrypt(SECRET, salt=b"pycomm secret 1", n=2**14, r=8, p=1, dklen=32)
HELLO = struct.Struct("<8s4I4H2I32s")
REPLY = struct.Struct("<2I32s")
HEADER = struct.Struct("<I2H3Q2I64sQ3I")  # followed by the checksum in some frames
WIRE = 9
UNCHECKED, HERE, NEXT = range(3)  # position of a payload's checksum
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
        version=WIRE,
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


def sealed(name: str, value: bytes, key: bytes = KEY, group: str = GROUP) -> bytes:
    """Return a value of the store with its proof."""
    text = f"{len(group)}:{group}{len(name)}:{name}".encode() + value
    proof = hmac.new(key, b"pycomm store\0" + text, "sha256").hexdigest()
    return b"sealed:" + proof.encode() + b":" + value


def opened(name: str, text: bytes) -> bytes:
    mark, _, value = text.split(b":", 2)
    assert mark == b"sealed"
    assert text == sealed(name, value)
    return value


def frame(
    payload: bytes,
    *,
    message: int = 1,
    offset: int = 0,
    size: int | None = None,
    tag_hash: int = 0,
    lane: int = 0,
    version: int = WIRE,
    magic: int = 0x4D435950,
    checks: int = HERE,
    before: int = 0,
    received: int = 0,
) -> bytes:
    whole = len(payload) if size is None else size
    ids = magic, version, lane, message, offset, whole, len(payload), tag_hash
    crc = _C.crc32c(payload) if checks == HERE else 0
    head = HEADER.pack(*ids, bytes(64), received, checks, crc, before)
    return head + struct.pack("<I", _C.crc32c(head)) + payload


def close_notice() -> bytes:
    notice = NOTICE.pack(0x4E435950, 2, 0, -1, 0, bytes(1000))
    return notice + struct.pack("<I", _C.crc32c(notice))


class RankZero:
    """Rank 0 of two, whose peer is played by the test."""

    def __init__(self, **options) -> None:
        defaults = dict(timeout=SECONDS, sockets=1, secret=SECRET.decode(), tls="off")
        self.options = defaults | options
        self.store = _C.Store.local()
        self.transport = None
        self.error: BaseException | None = None
        self.connections: dict[tuple[int, int], socket.socket] = {}
        self.thread = threading.Thread(target=self.set_up)
        self.thread.start()
        # The peer claims to be on the same host, and rank 0 does not connect to it.
        word = opened("tcp-host/0/", self.store.get(f"{GROUP}/tcp-host/0", SECONDS))
        host, _, nonce = word.partition(b"\x1enonce\x1f")
        ours = os.urandom(32).hex().encode()
        self.store.set(f"{GROUP}/tcp-host/1", sealed("tcp-host/1/", host + b"\x1enonce\x1f" + ours))
        self.session = hashlib.sha256(nonce + b" " + ours + b" ").hexdigest()
        text = self.store.get(f"{GROUP}/tcp-card/0", SECONDS)
        card = opened(f"tcp-card/0/{self.session}", text).decode()
        ip, port = card.split(" ")[0].rsplit(":", 1)
        self.address = ip, int(port)

    def publish_card(self) -> None:
        """Publish rank 1's address, to which rank 0 does not connect."""
        name = f"tcp-card/1/{self.session}"
        self.store.set(f"{GROUP}/tcp-card/1", sealed(name, b"127.0.0.1:1"))

    def proof(self, role: str, hello: bytes, challenge: bytes, key: bytes = KEY) -> bytes:
        label = f"{GROUP}/{self.session}"
        text = f"pycomm tcp {role}\0{len(label)}:{label}".encode()
        return _test.hmac_sha256(key, text + hello + challenge)

    def join(self, first: bytes, key: bytes = KEY):
        """Do a handshake; return the connection, and verdict and body of the last reply."""
        connection = socket.create_connection(self.address, SECONDS)
        connection.sendall(first)
        verdict, _, challenge = REPLY.unpack(read_exactly(connection, REPLY.size))
        if verdict != CHALLENGE:
            return connection, verdict, b""
        connection.sendall(self.proof("connect", first, challenge, key))
        verdict, _, body = REPLY.unpack(read_exactly(connection, REPLY.size))
        if verdict == WELCOME:
            assert body == self.proof("listen", first, challenge)
        return connection, verdict, body

    def leave(self) -> None:
        """Send rank 1's close notice, so that rank 0 waits for no answer to its own close."""
        with suppress(KeyError, OSError):
            self.connections[CONTROL, 0].sendall(close_notice())
        for connection in self.connections.values():
            connection.close()
        if self.transport is not None:
            self.transport.close()

    def set_up(self) -> None:
        try:
            self.transport = _test.Transport("tcp", self.store, GROUP, 0, 2, **self.options)
        except BaseException as error:
            self.error = error

    def come(self) -> dict[tuple[int, int], socket.socket]:
        """Join as rank 1; return its connections by lane and socket."""
        self.publish_card()
        sockets = self.options["sockets"]
        for lane, number in [*itertools.product((0, 1), range(sockets)), (CONTROL, 0)]:
            first = hello(lane, socket=number, sockets=sockets)
            self.connections[lane, number], verdict, _ = self.join(first)
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
