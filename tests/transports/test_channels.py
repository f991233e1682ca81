"""One suite over all transports: bytes arrive whole and in order, and so do reasons of an abort."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from pycomm import _C, _test, errors
from pycomm.communicator import Communicator
from tests.extent import each_value
from tests.ranks import on_threads
from tests.transports.ranks import (
    INSIDE,
    OUTSIDE,
    POINT_TO_POINT,
    SECONDS,
    pattern,
    processes,
    tag,
    threads,
)

MIB = 1 << 20
# Around the sizes of a frame, of a small message and of a ring of shared memory (256 KiB).
SIZES = [0, 1, 3, 79, 111, 112, 2047, 2048, 2049, 65_537, 262_144, 262_145, MIB + 3]


@pytest.fixture(params=["shm", "tcp"])
def run(request):
    """Run a body on ranks: threads, or processes where the transport needs them."""

    def run_on(size, body, **more):
        if request.param == "shm":
            return processes(size, body, **more)
        return threads(size, body, kind=request.param, **more)

    return run_on


@each_value
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_pair_exchanges_every_size(run, size):
    def body(me):
        for seq, n in enumerate(SIZES):
            got = me.exchange(
                {peer: pattern(n, me.rank * 8 + peer) for peer in me.peers}, tag(seq, n)
            )
            for peer in me.peers:
                assert got[peer] == pattern(n, peer * 8 + me.rank), (n, peer)

    run(size, body)


@each_value
@pytest.mark.parametrize("way", [OUTSIDE, INSIDE], ids=["checked", "unchecked"])
@pytest.mark.parametrize("size", [10_000, 100_000, 3 * MIB])
def test_a_send_ends_though_the_next_one_is_not_wanted_yet(run, size, way):
    """The receiver has the message, and posts the next receive only after the sender's wait."""
    after = 16 * MIB

    def body(me):
        if me.rank == 0:
            goal = me.send(1, pattern(size, 1), tag(1, size))
            last = me.send(1, bytes(after), tag(2, after))
            me.wait(goal)
            me.wait(me.send(1, b"go on", tag(1), POINT_TO_POINT), lane=POINT_TO_POINT)
            me.wait(last)
            return
        goal, result = me.recv(0, size, tag(1, size))
        me.wait(goal)
        assert result() == pattern(size, 1)
        goal, _ = me.recv(0, 5, tag(1), POINT_TO_POINT)
        me.wait(goal, lane=POINT_TO_POINT)
        goal, _ = me.recv(0, after, tag(2, after))
        me.wait(goal)

    run(2, body, options=way)


# ------------------------------------------------------------------------------------------ notices
# Abort notices: the kind of an error reaches the other ranks, by every medium that carries it.


TEXT = "rank 2 waits for rank 7: größer"
KINDS = {
    "error": (errors.Error, {}),
    "timeout": (errors.Timeout, {}),
    "mismatch": (errors.WireMismatch, {}),
    "lost": (errors.PeerLost, {"rank": 7, "ranks": [5, 7]}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def check(error: BaseException | None, kind: str, prefix: str = "rank 1 aborted the group: "):
    assert type(error) is KINDS[kind][0]
    # An error of no special kind does not name its rank.
    assert str(error).splitlines()[0] == (prefix if kind == "error" else "") + TEXT
    if kind == "lost":
        assert (error.rank, error.ranks) == (7, [5, 7])


def heard(check_once) -> BaseException | None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            check_once()
        except errors.Error as error:
            return error
        time.sleep(0.001)
    return None


@each_value
@every_kind
@pytest.mark.parametrize("medium", ["shm", "tcp"])
def test_every_kind_by_a_transport(medium, kind):
    def job(me):
        if me.rank == 1:
            me.transport.abort(TEXT, kind, **KINDS[kind][1])
        check(heard(me.transport.check), kind)

    threads(2, job, kind=medium)


@every_kind
def test_every_kind_by_the_control_page_of_a_device(kind):
    store = _C.Store.local()

    def job(rank):
        group = _test.DeviceGroup(store, rank, 2, timeout=SECONDS)
        if rank == 1:
            group.abort(TEXT, kind, **KINDS[kind][1])
        error = heard(group.check)
        group.close()
        return error

    for error in on_threads(range(2), job, 2 * SECONDS):
        check(error, kind)


@every_kind
def test_every_kind_by_the_store(kind):
    store = _C.Store.local()
    notice = _test.encode_notice(TEXT, kind, from_rank=1, **KINDS[kind][1])
    store.set("default/given up", notice)
    with pytest.raises(errors.Error) as raised:
        Communicator(store, 0, 2, timeout=SECONDS)
    check(raised.value, kind, 'rank 1 has left the rendezvous of group "default": ')


@pytest.mark.parametrize("ranks", [[], [0, 3], list(range(1000))], ids=len)
def test_a_long_notice_keeps_its_kind(ranks):
    long = _test.encode_notice("ä" * 2000, "lost", rank=900, ranks=ranks, room=1000)
    assert len(long) <= 1000
    with pytest.raises(errors.PeerLost) as raised:
        _test.raise_notice(long)
    assert set(str(raised.value)) == {"ä"}
    assert raised.value.rank == 900
    assert raised.value.ranks == sorted({*ranks[:128], 900})


def test_bytes_that_are_no_notice_are_an_error():
    notice = _test.encode_notice(TEXT, "lost", from_rank=1, rank=7, ranks=[5, 7])
    bad = [notice[:size] for size in range(len(notice))]
    bad += [b"\x07" + notice[1:], notice[:2] + b"\xff\xff" + notice[4:], b"\xff" * 1000]
    for data in bad:
        with pytest.raises(errors.Error, match="its reason cannot be read") as raised:
            _test.raise_notice(data)
        assert type(raised.value) is errors.Error
    for place in range(len(notice)):
        for bit in range(8):
            data = bytearray(notice)
            data[place] ^= 1 << bit
            with suppress(errors.Error, UnicodeDecodeError):
                _test.raise_notice(bytes(data))
