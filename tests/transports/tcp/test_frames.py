"""Frames of the TCP transport from a handwritten peer: any fragmentation of their bytes works, and
damage is detected."""

from __future__ import annotations

import random
import select
import threading

import pytest

import pycomm.errors
from pycomm import _C
from tests.transports.ranks import (
    INSIDE,
    OUTER,
    OUTSIDE,
    SECONDS,
    Rank,
    pattern,
    tag,
    threads,
)
from tests.transports.wire_peer import (
    CONTROL,
    HEADER,
    HERE,
    MIB,
    NEXT,
    UNCHECKED,
    WIRE,
    RankZero,
    close_notice,
    frame,
    read_exactly,
)


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
        (lambda h: frame(b"1234", tag_hash=h, version=WIRE + 1), f"version {WIRE + 1}"),
        (lambda h: frame(b"1234", tag_hash=h, lane=1), "wrong lane"),
        (lambda h: frame(b"1234", tag_hash=h, message=0), "no message number"),
        (lambda h: frame(b"1234", tag_hash=h, offset=1, size=4), "does not fit"),
        (lambda h: frame(b"1234", tag_hash=h, offset=2**64 - 2, size=4), "does not fit"),
        (lambda h: frame(b"", tag_hash=h, size=4), "does not fit"),
        (
            lambda h: (
                frame(b"12", size=4, tag_hash=h) + frame(b"123", offset=1, size=4, tag_hash=h)
            ),
            "arrived twice",
        ),
        (lambda h: frame(b"1234", tag_hash=h, checks=3), "checked in a way that is unknown"),
        (lambda h: frame(b"", tag_hash=h, checks=NEXT), "checked in a way that is unknown"),
        (lambda h: frame(b"1234", tag_hash=h, received=MIB), "acknowledges bytes that were"),
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


def checksum_in_next(checksum: int | None, last: bytes, our_hash: int, **follows) -> bytes:
    """Return a first frame of 1000 bytes, whose checksum is in the header that follows."""
    size = 1000 + len(last)
    first = frame(pattern(1000, 1), size=size, tag_hash=our_hash, checks=NEXT)
    crc = _C.crc32c(pattern(1000, 1)) if checksum is None else checksum
    return first + frame(last, before=crc, **follows)


@pytest.mark.parametrize("crc", [None, 7], ids=["right", "wrong"])
def test_a_checksum_in_the_next_header_is_compared(rank_0, our_hash, crc):
    follows = dict(offset=1000, size=3000, tag_hash=our_hash)
    rank_0.connections[0, 0].sendall(checksum_in_next(crc, pattern(2000, 2), our_hash, **follows))
    if crc is None:
        assert rank_0.expect(3000) == pattern(1000, 1) + pattern(2000, 2)
        return
    with pytest.raises(pycomm.errors.Error, match=r"from rank 1 .* bytes 0 to 1000 of 3000 were"):
        rank_0.expect(3000)


def test_a_message_waits_for_its_last_checksum(rank_0, our_hash):
    """The checksum comes in a header that only acknowledges."""
    data = checksum_in_next(None, b"", our_hash, message=0)
    rank_0.connections[0, 0].sendall(data[:-1])
    me = Rank(0, 2, rank_0.transport)
    goal, result = me.recv(1, 1000, tag())
    with pytest.raises(pycomm.errors.Timeout):
        me.wait(goal, timeout=0.2)
    rank_0.connections[0, 0].sendall(data[-1:])
    me.wait(goal)
    assert result() == pattern(1000, 1)


@pytest.mark.parametrize("late", [False, True], ids=["reading", "its checksum is to come"])
def test_frames_never_hold_more_than_their_message(late):
    """Otherwise the message would be complete before the second of them ends."""
    rank = RankZero(sockets=2)
    connections = rank.come()
    me = Rank(0, 2, rank.transport)
    me.wait(me.send(1, b"", tag()))
    carrier, _, _ = select.select([connections[0, n] for n in (0, 1)], [], [], SECONDS)
    our_hash = HEADER.unpack(read_exactly(carrier[0], HEADER.size + 4)[:-4])[7]
    first = frame(pattern(1000, 1), tag_hash=our_hash, checks=NEXT if late else HERE)
    connections[0, 0].sendall(first if late else first[:-1])
    goal, _ = me.recv(1, 1000, tag())
    with pytest.raises(pycomm.errors.Timeout):
        me.wait(goal, timeout=0.2)
    connections[0, 1].sendall(frame(pattern(1000, 1), tag_hash=our_hash))
    with pytest.raises(pycomm.errors.Error, match="a frame arrived twice"):
        me.wait(goal)
    rank.leave()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, [HERE]),
        (100, [HERE]),
        (MIB // 8, [NEXT, UNCHECKED]),
        (MIB, [NEXT] * 4 + [UNCHECKED]),
        (MIB + 1, [NEXT] * 4 + [HERE]),
    ]
    * (OUTER is not None),
)
def test_what_is_sent_has_a_checksum_of_every_payload(size, expected):
    """Long payloads have it in the next header, which has no payload itself if nothing follows."""
    rank = RankZero(**OUTSIDE)
    connection = rank.come()[0, 0]
    payload, me = pattern(size, 3), Rank(0, 2, rank.transport)
    sending = threading.Thread(target=lambda: me.wait(me.send(1, payload, tag())))
    sending.start()
    got, owed, places = b"", None, []
    while len(got) < size or owed is not None or not places:
        header = HEADER.unpack(read_exactly(connection, HEADER.size + 4)[:-4])
        if owed is not None:
            assert header[12] == owed
        owed = None
        part = read_exactly(connection, header[6])
        places.append(header[10])
        if header[10] == HERE:
            assert header[11] == _C.crc32c(part)
        elif part:
            owed = _C.crc32c(part)
        got += part
    sending.join()
    assert got == payload
    assert places == expected
    rank.leave()


def test_payload_that_is_not_checked_is_taken_as_it_is(rank_0, our_hash):
    rank_0.connections[0, 0].sendall(frame(b"1234", tag_hash=our_hash, checks=UNCHECKED))
    assert rank_0.expect(4) == b"1234"


@pytest.mark.parametrize("other", [OUTSIDE, INSIDE], ids=["checked", "unchecked"])
def test_sender_says_what_is_checked(other):
    got = threads(
        2,
        lambda me: me.exchange({1 - me.rank: pattern(3 * MIB, me.rank)}, tag()),
        options=lambda rank: other if rank else OUTSIDE,
    )
    assert got == [{1: pattern(3 * MIB, 1)}, {0: pattern(3 * MIB, 0)}]


@pytest.mark.parametrize(("interface", "checks"), [("lo", 0)] + [(OUTER, 1)] * (OUTER is not None))
def test_payloads_that_leave_the_host_are_checked(interface, checks):
    rank_0 = RankZero(interface=interface)
    connections = rank_0.come()
    me = Rank(0, 2, rank_0.transport)
    me.wait(me.send(1, b"payload", tag()))
    assert HEADER.unpack(read_exactly(connections[0, 0], HEADER.size))[10] == checks
    rank_0.leave()


@pytest.mark.parametrize(
    ("data", "size"),
    [
        *((lambda h, cut=cut: frame(b"1234", tag_hash=h)[:cut], 4) for cut in (1, 127, 128, 131)),
        (lambda h: frame(pattern(1000, 1), tag_hash=h, checks=NEXT), 1000),
    ],
    ids=["1", "127", "128", "131", "a checksum that never comes"],
)
def test_torn_frame_is_a_lost_peer(rank_0, our_hash, data, size):
    rank_0.connections[0, 0].sendall(data(our_hash))
    for connection in rank_0.connections.values():
        connection.close()
    with pytest.raises(pycomm.errors.PeerLost) as lost:
        rank_0.expect(size)
    assert lost.value.rank == 1


@pytest.mark.parametrize(
    ("lane", "data"),
    [
        (0, frame(b"1234")[:1]),
        (0, frame(b"1234")[:127]),
        (1, frame(b"1234", message=2)),  # it has begun the next message
    ],
    ids=["1 byte", "127 bytes", "the next message"],
)
def test_bytes_of_a_rank_that_left_are_not_awaited(lane, data):
    """One of its two connections is cut; it has left, and will not connect again."""
    rank = RankZero(sockets=2)
    connections = rank.come()
    connections[0, lane].sendall(data)
    connections[CONTROL, 0].sendall(close_notice())
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
