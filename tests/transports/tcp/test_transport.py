"""TCP: set-up among unknown peers, secrets, interfaces, lost peers and pacing."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import pycomm.errors
from pycomm import _C, _test, errors
from pycomm.errors import Error
from tests.extent import each_value
from tests.ranks import run_processes
from tests.soak.held import held
from tests.transports.ranks import SECONDS, pattern, processes, tag, threads

MIB = 1 << 20
beyond_loopback = pytest.mark.skipif(
    all(ip.startswith(("127.", "::1")) for _, ip in _C.interfaces()),
    reason="this machine has no interface but loopback",
)


# ------------------------------------------------------------------------------ several sockets


@each_value
@pytest.mark.parametrize("sockets", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 128 << 10, (128 << 10) + 1, 3 * MIB + 5])
def test_sockets_share_a_message(sockets, size):
    def body(me):
        other = 1 - me.rank
        for seq in range(3):
            got = me.exchange({other: pattern(size, seq)}, tag(seq))
            assert got[other] == pattern(size, seq)
        return me.transport.describe()

    described = threads(2, body, options={"sockets": sockets})
    assert f"{sockets} socket" in described[0]


@pytest.mark.parametrize(("option", "value"), [("sockets", -1), ("sockets", 17), ("ports", "9-8")])
def test_a_wrong_value_of_an_option_is_refused(option, value):
    with pytest.raises(pycomm.errors.Error, match=f"PYCOMM_{option.upper()}"):
        _test.Transport("tcp", _C.Store.local(), "g", 0, 1, **{option: value})


# ------------------------------------------------------------------------------ set-up


def test_loopback_of_ipv6():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 on this host")

    def body(me):
        me.exchange({1 - me.rank: b"hello"}, tag())
        return me.transport.describe()

    assert "(::1)" in threads(2, body, options={"interface": "::1"})[0]


CANDIDATES = [
    ("lo", "127.0.0.1"),
    ("docker0", "172.17.0.1"),
    ("eth10", "10.0.10.5"),
    ("eth1", "10.0.1.5"),
    ("ib0", "192.168.0.5"),
    ("eth1", "fd00::5"),
]


@pytest.mark.parametrize(
    ("names", "one_host", "chosen"),
    [
        ("", True, ["127.0.0.1"]),
        ("", False, ["10.0.10.5"]),
        ("ib", False, ["192.168.0.5"]),
        ("eth", False, ["10.0.10.5", "10.0.1.5"]),
        ("eth1", False, ["10.0.1.5"]),
        ("eth1,eth10", False, ["10.0.1.5", "10.0.10.5"]),
        ("eth*", False, ["10.0.10.5", "10.0.1.5"]),
        ("eth1?", False, ["10.0.10.5"]),
        ("^docker*,ib*", False, ["10.0.10.5"]),
        ("eth*,^*0", False, ["10.0.1.5"]),
        ("=eth1,ib0", False, ["10.0.1.5", "192.168.0.5"]),
        ("wlan,ib", False, ["192.168.0.5"]),
        ("^lo,docker", False, ["10.0.10.5"]),
        ("^eth10", False, ["10.0.1.5"]),
        ("^eth10", True, ["127.0.0.1"]),
        ("^lo,docker,eth", True, ["192.168.0.5"]),
        ("eth,^eth10", False, ["10.0.1.5"]),
        ("fd00::5", False, ["fd00::5"]),
        ("10.0.1.5", True, ["10.0.1.5"]),
        ("10.0.1.5,192.168.0.5", False, ["10.0.1.5", "192.168.0.5"]),
    ],
)
def test_interfaces_are_chosen_by_name_or_address(names, one_host, chosen):
    assert [ip for _, ip in _C.choose_interfaces(names, one_host, CANDIDATES)] == chosen


@pytest.mark.parametrize("names", ["wlan", "wl*", "=eth", "10.0.0.9", "^lo,docker,eth,ib"])
def test_interface_that_is_not_there_lists_those_that_are(names):
    with pytest.raises(pycomm.errors.Error, match=r"ib0 \(192.168.0.5\).*PYCOMM_INTERFACE"):
        _C.choose_interfaces(names, False, CANDIDATES)


def test_bridges_of_containers_are_the_last_choice():
    assert _C.choose_interfaces("", False, CANDIDATES[:2]) == [("docker0", "172.17.0.1")]
    with pytest.raises(pycomm.errors.Error, match="only loopback is up"):
        _C.choose_interfaces("", False, CANDIDATES[:1])


# ------------------------------------------------------------------------------ lazy connections


@pytest.mark.parametrize("sender", [0, 1], ids=["lower rank sends", "higher rank sends"])
def test_sockets_of_a_lane_are_made_when_somebody_sends(tmp_path, sender):
    def body(me):
        counts = [held("self")["sockets"]]
        for lane in (0, 1):
            if me.rank == sender:
                goals = [me.send(1 - me.rank, b"first words", tag(), lane)]
            elif me.rank == 1 - sender:
                goal, result = me.recv(sender, 11, tag(), lane)
                goals = [goal]
            else:
                goals = []
            me.wait(*goals, lane=lane)
            if me.rank == 1 - sender:
                assert result() == b"first words"
            counts.append(held("self")["sockets"])
        (tmp_path / f"done {me.rank}").touch()
        while len(list(tmp_path.glob("done *"))) < 4:  # a leaving rank closes peers' sockets
            time.sleep(0.001)
        return counts

    counts = processes(4, body, kind="tcp", options={"sockets": 3})
    idle = counts[3][0]
    assert counts[2] == counts[3] == [idle, idle, idle]
    assert counts[sender] == [idle, idle + 3, idle + 6]
    assert counts[1 - sender][-1] == idle + 6


def test_rank_that_computes_can_be_connected():
    met = threading.Barrier(2)

    def body(me):
        if me.rank == 0:
            # Rank 1, which has to connect, does nothing meanwhile.
            me.wait(me.send(1, b"hello", tag()))
            met.wait(SECONDS)
            return None
        met.wait(SECONDS)
        goal, result = me.recv(0, 5, tag())
        me.wait(goal)
        return result()

    assert threads(2, body)[1] == b"hello"


# ------------------------------------------------------------------------------ faults


def check_until(seconds, transport):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        transport.check()
        time.sleep(0.001)


def test_abort_does_not_wait_behind_data():
    # Rank 1 receives nothing, so the data connections are full when rank 0 aborts.
    def body(me):
        if me.rank == 0:
            me.send(1, pattern(64 * MIB, 0), tag())
            me.transport.abort("enough")
            return None
        with pytest.raises(pycomm.errors.Error, match="rank 0 aborted the group: enough"):
            check_until(SECONDS, me.transport)

    threads(2, body)


# ------------------------------------------------------------------------------ pacing


@pytest.mark.parametrize("peers", [1, 2])
def test_pacing_holds_the_rate_over_all_peers(peers):
    rate, size = 20e6, 4 * MIB

    def body(me):
        me.exchange(dict.fromkeys(me.peers, b""), tag(0))
        if me.rank == 0:
            goals = [me.send(peer, bytes(size // peers), tag()) for peer in me.peers]
        else:
            goals = [me.recv(0, size // peers, tag())[0]]
        start = time.monotonic()
        me.wait(*goals)
        return time.monotonic() - start

    # A busy machine only adds to the time, so one good run of ten suffices.
    for _ in range(10):
        seconds = max(threads(1 + peers, body, options={"link": f"{rate:g}"}))
        # A burst of 64 KiB is not delayed.
        assert (size - (64 << 10)) / rate * 0.98 <= seconds
        if seconds < size / rate * 1.2:
            return
    pytest.fail(f"{seconds} s for what takes {size / rate} s, ten times")


def test_pacing_wakes_for_small_messages():
    def body(me):
        start = time.monotonic()
        for seq in range(50):
            me.exchange({1 - me.rank: bytes(100)}, tag(seq))
        return time.monotonic() - start

    assert max(threads(2, body, options={"link": "1MB"})) < 2


# ------------------------------------------------------------------------------ congestion control


ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


@pytest.mark.parametrize(("name", "control"), [("auto", "reno"), (ALLOWED[-1], ALLOWED[-1])])
def test_congestion_control_inside_a_host(name, control):
    """Each rank controls what it sends itself: they need not agree."""
    described = threads(
        2,
        lambda me: me.transport.describe(),
        options=lambda rank: {"congestion": name if rank == 0 else "reno"},
    )
    assert [text.rsplit(", ", 1)[1] for text in described] == [control, "reno"]


@pytest.mark.parametrize("name", ["", "no-such", "a-name-that-is-longer-than-any"])
def test_congestion_control_that_the_kernel_refuses(name):
    with pytest.raises(
        pycomm.errors.Error, match=f'refuses the congestion control "{name}".*PYCOMM_CONGESTION'
    ):
        _test.Transport("tcp", _C.Store.local(), "g", 0, 1, congestion=name)


# -------------------------------------------------------------------------------- few descriptors
# A rank without a free descriptor waits for one when a connection was cut, but not for ever.


def cut_connections(names):
    """Cut those of these descriptors that are connections of TCP, as a router might."""
    for name in names:
        with suppress(OSError):
            connection = socket.socket(fileno=int(name))
            with suppress(OSError):  # of a listener
                connection.getpeername()
                if connection.family == socket.AF_INET:
                    connection.shutdown(socket.SHUT_RDWR)
            connection.detach()


FEW = 16


def take_few(rank):
    """None of these is a socket, and so none is free when connections are closed."""
    for _ in range(FEW):
        os.dup(0)


def allow(descriptors):
    """What is open stays open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))


def starving(c, starved, back):
    """Sums over connections that are cut while one rank has no descriptor, for `back` seconds."""
    x = np.ones(100_000, np.float32)
    c.all_reduce(x)
    if c.rank == starved:
        threading.Timer(back, allow, (1024,)).start()
        names = os.listdir("/proc/self/fd")
        allow(FEW)
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        cut_connections(names)
    c.all_reduce(x)
    assert (x == 4).all()
    return True


# The higher of two ranks connects, the lower accepts.
ROLES = pytest.mark.parametrize("starved", [1, 0], ids=["connects", "accepts"])


@ROLES
def test_a_cut_heals_when_a_descriptor_is_free_again(starved):
    job = partial(starving, starved=starved, back=1.0)
    assert run_processes(2, job, prepare=take_few, transport="tcp") == [True, True]


def errors_of(c, starved):
    try:
        return starving(c, starved, 30.0)
    except Error as error:
        return str(error)


@ROLES
def test_a_rank_without_descriptors_says_so(starved):
    job = partial(errors_of, starved=starved)
    texts = run_processes(2, job, prepare=take_few, transport="tcp", timeout=40.0)
    own, other = texts[starved], texts[1 - starved]
    assert f"rank {starved} can make no connection: Too many open files" in own
    assert "no descriptor left of the 16 that RLIMIT_NOFILE allows it" in own
    assert f"rank {starved} " in other  # whom no connection can tell the reason


# ---------------------------------------------------------------------------------------- addresses
# Ports from a range, advertised addresses, and families of addresses.


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
    group = []

    def body(me):
        exchange(me)
        group.append(me.rank)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        for _ in range(2):  # the second time connections of the first are in TIME_WAIT
            threads(2, body, options={"ports": f"{first}-{last}"})
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


@beyond_loopback
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
    store = _C.Store.local()
    store.set("g/tcp-host/1", "another-host 1 - -")
    with pytest.raises(errors.Error) as raised:
        _test.Transport("tcp", store, "g", 0, 2, timeout=SECONDS, advertise=advertise)
    assert text in str(raised.value)


@beyond_loopback
def test_an_address_that_is_mapped_to_ours_is_published():
    store = _C.Store.local()
    store.set("g/tcp-host/1", "another-host 1 - -")
    with pytest.raises(errors.Timeout):
        _test.Transport("tcp", store, "g", 0, 2, timeout=0.5, advertise="203.0.113.7")
    card = store.get("g/tcp-card/0", SECONDS).decode()
    assert card.startswith("203.0.113.7:")
