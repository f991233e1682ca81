"""Ports from a range, advertised addresses, and families of addresses."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from pycomm import _C, errors
from tests.transports.ranks import SECONDS, tag, threads


@pytest.fixture
def ports():
    """Return three ports in a row that are free."""
    for first in range(29600, 60000, 3):
        with ExitStack() as held:
            try:
                for port in range(first, first + 3):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first, first + 2
    pytest.skip("no three ports in a row are free")


def exchange(me) -> None:
    me.exchange({1 - me.rank: b"hello"}, tag())


def test_ranks_listen_on_free_ports_of_the_range(ports):
    first, last = ports
    store = _C.Store.local()
    group = []

    def body(me):
        exchange(me)
        group.append(me.rank)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        for _ in range(2):  # the second time connections of the first are in TIME_WAIT
            threads(2, body, store=store, options={"ports": f"{first}-{last}"})
    assert sorted(group) == [0, 0, 1, 1]


def test_a_range_that_is_taken_is_named_and_nothing_waits(ports):
    first, last = ports
    with ExitStack() as held:
        for port in range(first, last + 1):
            taken = held.enter_context(socket.socket())
            taken.bind(("", port))
            taken.listen()
        text = f"no port of PYCOMM_PORTS={first}-{last} is free on "
        outcomes = threads(2, exchange, errors=True, options={"ports": f"{first}-{last}"})
    for outcome in outcomes:
        assert type(outcome) is errors.Error
        assert text in str(outcome)


@pytest.mark.parametrize("ports", ["1-", "9-8", "70000", "x", "-5", "1-2-3"])
def test_a_malformed_range_is_refused(ports):
    for outcome in threads(2, exchange, errors=True, options={"ports": ports}):
        assert f"PYCOMM_PORTS={ports} is invalid: expected a range" in str(outcome)


@pytest.mark.parametrize(
    ("advertise", "text"),
    [
        ("nat.example", '"nat.example" is no address'),
        ("fe80::1", '"fe80::1" is no address'),
        ("203.0.113.7,203.0.113.8", "has 2 addresses for 1 interfaces"),
        ("203.0.113.7:40000", "set PYCOMM_PORTS to that one"),
    ],
)
def test_what_cannot_be_advertised_is_refused(advertise, text):
    """Only groups that span hosts use it: rank 1 claims to be on another one."""
    others = [ip for _, ip in _C.interfaces() if not ip.startswith(("127.", "::1"))]
    if not others:
        pytest.skip("this machine has no interface but loopback")
    store = _C.Store.local()
    store.set("g/tcp-host/1", "another-host 1 - -")
    with pytest.raises(errors.Error) as raised:
        _C.Transport("tcp", store, "g", 0, 2, timeout=SECONDS, advertise=advertise)
    assert text in str(raised.value)


def test_an_address_that_is_mapped_to_ours_is_published():
    others = [ip for _, ip in _C.interfaces() if not ip.startswith(("127.", "::1"))]
    if not others:
        pytest.skip("this machine has no interface but loopback")
    store = _C.Store.local()
    store.set("g/tcp-host/1", "another-host 1 - -")
    with pytest.raises(errors.Timeout):
        _C.Transport("tcp", store, "g", 0, 2, timeout=0.5, advertise="203.0.113.7")
    card = store.get("g/tcp-card/0", SECONDS).decode()
    assert card.startswith("203.0.113.7:")
