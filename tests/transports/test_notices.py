"""Abort notices: the kind of an error reaches the other ranks, by every medium that carries it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from pycomm import _C, errors
from pycomm.communicator import Communicator
from tests.extent import each_value
from tests.ranks import join
from tests.transports.ranks import RUNNERS, SECONDS, threads

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
@pytest.mark.parametrize("medium", ["local", "shm", "tcp"])
def test_every_kind_by_a_transport(medium, kind):
    def job(me):
        if me.rank == 1:
            me.transport.abort(TEXT, kind, **KINDS[kind][1])
        check(heard(me.transport.check), kind)

    {**RUNNERS, "tcp": threads}[medium](2, job)


@every_kind
def test_every_kind_by_the_control_page_of_a_device(kind):
    store = _C.Store.local()
    outcomes = {}

    def job(rank):
        group = _C.DeviceGroup(store, rank, 2, timeout=SECONDS)
        if rank == 1:
            group.abort(TEXT, kind, **KINDS[kind][1])
        outcomes[rank] = heard(group.check)
        group.close()

    ranks = [threading.Thread(target=job, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert not join(ranks, 2 * SECONDS)
    for rank in range(2):
        check(outcomes[rank], kind)


@every_kind
def test_every_kind_by_the_store(kind):
    store = _C.Store.local()
    notice = _C.encode_notice(TEXT, kind, from_rank=1, **KINDS[kind][1])
    store.set("default/given up", notice)
    with pytest.raises(errors.Error) as raised:
        Communicator(store, 0, 2, timeout=SECONDS)
    check(raised.value, kind, 'rank 1 has left the rendezvous of group "default": ')


@pytest.mark.parametrize("text", ["[timeout] of a word", "[lost 3] and found", "[mismatch] "])
def test_a_text_is_never_taken_for_a_kind(text):
    def body(me):
        if me.rank == 1:
            me.transport.abort(text)
        error = heard(me.transport.check)
        assert type(error) is errors.Error
        assert str(error) == "rank 1 aborted the group: " + text

    threads(2, body)


@pytest.mark.parametrize("ranks", [[], [0, 3], list(range(1000))], ids=len)
def test_a_long_notice_keeps_its_kind(ranks):
    long = _C.encode_notice("ä" * 2000, "lost", rank=900, ranks=ranks, room=1000)
    assert len(long) <= 1000
    with pytest.raises(errors.PeerLost) as raised:
        _C.raise_notice(long)
    assert set(str(raised.value)) == {"ä"}
    assert raised.value.rank == 900
    assert raised.value.ranks == sorted({*ranks[:128], 900})


def test_bytes_that_are_no_notice_are_an_error():
    notice = _C.encode_notice(TEXT, "lost", from_rank=1, rank=7, ranks=[5, 7])
    bad = [notice[:size] for size in range(len(notice))]
    bad += [b"\x07" + notice[1:], notice[:2] + b"\xff\xff" + notice[4:], b"\xff" * 1000]
    for data in bad:
        with pytest.raises(errors.Error, match="its reason cannot be read") as raised:
            _C.raise_notice(data)
        assert type(raised.value) is errors.Error
    for place in range(len(notice)):
        for bit in range(8):
            data = bytearray(notice)
            data[place] ^= 1 << bit
            with suppress(errors.Error, UnicodeDecodeError):
                _C.raise_notice(bytes(data))
