"""Reconnecting: connections that are cut while both processes live resume without loss."""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy as np
import pytest

from pycomm.errors import Error, PeerLost, Timeout
from tests.extent import each_value
from tests.ranks import good, on_threads
from tests.transports import proxy
from tests.transports.ranks import (
    COLLECTIVE,
    INSIDE,
    OUTSIDE,
    POINT_TO_POINT,
    Rank,
    tag,
    transport,
)
from tests.transports.wire_peer import CONTROL, NOTICE, RankZero, hello, read_exactly

ROUNDS = 12
SIZES = [1, 1000, 60_000, 300_000]


def storm(seed: int, pause: float):
    """Return a disturbance that cuts a connection at random, again and again."""
    chance = random.Random(seed)
    cuts = itertools.count()

    def weather(network):
        time.sleep(chance.uniform(0, 2 * pause))
        if network.cut(chance):
            next(cuts)

    weather.cuts = cuts
    return weather


def finish(c, network):
    """Make one more call without disturbances. Data that are cut off after a sender's last call are
    sent again when the sender next communicates."""
    network.calm = True
    with network.weather:  # waits for the end of a cut in progress
        pass
    c.barrier()


def exact(c, network):
    """Reduce integers, whose sums do not depend on the order of additions."""
    for seq, size in itertools.product(range(ROUNDS), SIZES):
        x = np.arange(size, dtype=np.float32) % 1000 + c.rank + seq
        c.all_reduce(x)
        ranks = c.size
        want = ranks * (np.arange(size, dtype=np.float32) % 1000 + seq) + sum(range(ranks))
        assert np.array_equal(x, want)
        root = np.full(size, seq if c.rank == 0 else -1, np.float32)
        c.broadcast(root, 0)
        assert (root == seq).all()
        assert "tcp" in c.describe()  # also while connections are made, as a sanitizer sees
    finish(c, network)


TLS = {"tls": "on"}


@each_value
@pytest.mark.parametrize(
    ("ranks", "sockets", "options"),
    [(2, 1, OUTSIDE), (2, 3, OUTSIDE), (2, 3, INSIDE), (3, 2, OUTSIDE), (2, 1, TLS), (2, 3, TLS)],
)
def test_collectives_go_on_when_connections_are_cut(ranks, sockets, options):
    weather = storm(ranks + sockets, 0.03)
    good(proxy.run(ranks, exact, weather=weather, sockets=sockets, **options))
    assert next(weather.cuts) > 0


@each_value
@pytest.mark.parametrize("numel", [200_000, 4_000_000])
@pytest.mark.parametrize("sockets", [1, 2])
def test_words_that_were_cut_off_at_the_end_are_repeated(numel, sockets):
    """They may be more than a socket takes at once."""

    def job(c, network):
        for seq in range(4):
            x = np.full(numel, seq, np.float32)
            c.broadcast(x, 0)
            if c.rank == 0 and seq == 3:
                network.cut()  # rank 0 has nothing more to do: it sends again while it leaves
            assert (x == seq).all()
        return True

    for _ in range(5):
        good(proxy.run(2, job, sockets=sockets))


def until_calm(c, network):
    """Call until rank 0 reports the end of the disturbances."""
    over, seq = np.zeros(1), 0
    while not over[0]:
        x = np.full(1000, seq, np.float32)
        c.all_reduce(x)
        assert (x == 2 * seq).all()
        over[0] = network.calm
        c.broadcast(over, 0)
        seq += 1
    return True


def test_a_port_that_refuses_for_a_while_is_no_death():
    """Such a port belongs to a proxy that restarts, or a firewall that loads its rules."""

    def restart(network):
        for each in network.proxies.values():
            each.restart(0.3)
        network.calm = True

    good(proxy.run(2, until_calm, weather=restart))


def test_a_stranger_on_the_port_for_a_while_is_no_death():
    """Such a port belongs to a proxy that answers itself until it knows where to forward."""

    def stranger(network):
        for each in network.proxies.values():
            each.stranger = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n\r\n"
            each.cut()
        time.sleep(0.3)
        for each in network.proxies.values():
            each.stranger = b""
        network.calm = True

    good(proxy.run(2, until_calm, weather=stranger))


class Wires:
    """Two ranks with only a transport, and the network between them."""

    def __init__(self):
        self.network = proxy.Network(2, "group", ("tcp-host", "tcp-card"))

    def run(self, *bodies, **options):
        def target(rank):
            with transport(self.network.stores[rank], rank, 2, kind="tcp", **options) as me:
                return bodies[rank](me)

        outcomes = on_threads(range(2), target, 100)
        self.network.close()
        return good(outcomes)

    def swallow(self, silent):
        """Discard everything that is sent from now on."""
        for each in self.network.proxies.values():
            each.silent = silent

    def hold(self):
        """Keep everything that is sent from now on in the senders' kernel."""
        for each in self.network.proxies.values():
            each.held = True
        time.sleep(3 * proxy.TICK)

    def release(self):
        for each in self.network.proxies.values():
            each.held = False


BOTH_LANES = (COLLECTIVE, POINT_TO_POINT)


def greet(me):
    """Connect both lanes."""
    for lane in BOTH_LANES:
        me.exchange({1 - me.rank: b"hello"}, tag(), lane)


class SilentFirst(proxy.Proxy):
    """What takes the first call, and forwards nothing."""

    silent = property(lambda self: self.accepted == 1, lambda self, value: None)


def test_a_call_that_is_taken_and_leads_to_nobody_is_made_again(monkeypatch):
    """As by a load balancer that does not know yet where the rank is."""
    monkeypatch.setattr(proxy, "Proxy", SilentFirst)
    Wires().run(greet, greet)


def test_a_lane_that_nobody_drives_goes_on_after_a_cut():
    """A sender learns the progress of a receiver that waits for something else."""
    wires = Wires()

    def sender(me):
        greet(me)
        wires.network.cut()
        time.sleep(0.02)  # the kernel has processed it
        me.wait(me.send(1, b"early", tag(2), POINT_TO_POINT), lane=POINT_TO_POINT, timeout=5)
        me.wait(me.send(1, b"go on", tag(3)))

    def receiver(me):
        greet(me)
        goal, _ = me.recv(0, 5, tag(3))
        me.wait(goal)
        goal, word = me.recv(0, 5, tag(2), POINT_TO_POINT)
        me.wait(goal, lane=POINT_TO_POINT)
        assert word() == b"early"

    wires.run(sender, receiver)


def test_an_idle_rank_repeats_what_was_cut_off():
    wires = Wires()
    arrived = threading.Event()

    def sender(me):
        greet(me)
        wires.swallow(True)
        me.wait(me.send(1, b"lost", tag(2)))
        time.sleep(0.02)
        wires.swallow(False)
        wires.network.cut()
        assert arrived.wait(5)

    def receiver(me):
        greet(me)
        goal, word = me.recv(0, 4, tag(2))
        me.wait(goal)
        assert word() == b"lost"
        arrived.set()

    wires.run(sender, receiver)


class LostWelcome:
    """A tap that lets nothing through from the last word of a lane's first handshake on."""

    def __init__(self):
        self.words, self.lost = 0, threading.Event()

    def __call__(self, data):
        if data.startswith(b"pycomm\r\n") or self.words:  # hello, challenge, proof, welcome
            self.words += 1
        if self.words < 4:
            return data
        self.lost.set()
        return b""


def test_a_half_open_connection_loses_nothing():
    wires, tap, arrived = Wires(), LostWelcome(), threading.Event()

    def accepts(me):
        listener = wires.network.proxies[0]
        listener.tap = tap
        me.wait(me.send(1, b"early", tag(2)))
        assert tap.lost.wait(10)
        time.sleep(0.05)  # what is written goes with it
        listener.tap = lambda data: data
        wires.network.cut()
        assert arrived.wait(10)

    def connects(me):
        goal, word = me.recv(0, 5, tag(2))
        me.wait(goal, timeout=10)
        assert word() == b"early"
        arrived.set()

    wires.run(accepts, connects, sockets=1)


def test_a_request_to_connect_that_was_cut_off_is_repeated():
    """A lower rank asks for the connections of a lane, on a control connection that is then cut."""
    rank = RankZero()
    rank.publish_card()
    control, _, _ = rank.join(hello(CONTROL))
    rank.thread.join()
    me = Rank(0, 2, rank.transport)
    goal = me.send(1, b"word", tag())
    request = read_exactly(control, NOTICE.size + 4)
    control.close()
    rank.connections[CONTROL, 0], _, _ = rank.join(hello(CONTROL, generation=1))
    assert read_exactly(rank.connections[CONTROL, 0], NOTICE.size + 4) == request
    rank.connections[0, 0], _, _ = rank.join(hello())
    me.wait(goal)
    rank.leave()


def test_a_close_that_was_cut_off_is_repeated():
    wires, greeted = Wires(), threading.Event()

    def leaver(me):
        greet(me)
        assert greeted.wait(5)
        wires.swallow(True)
        threading.Timer(0.05, lambda: (wires.swallow(False), wires.network.cut())).start()

    def stayer(me):
        greet(me)
        greeted.set()
        goal, _ = me.recv(0, 4, tag(2))
        with pytest.raises(PeerLost, match=r"rank 0 .* has left the group"):
            me.wait(goal)

    wires.run(leaver, stayer)


def test_bytes_that_were_cut_off_come_before_the_close():
    """A rank that has left is not asked for anything, and may be gone."""
    wires, greeted = Wires(), threading.Event()

    def slowly(data):
        if data.startswith(b"PYCR"):  # what resumes a stream
            time.sleep(0.1)
        return data

    def cut():
        wires.network.proxies[0].tap = slowly
        wires.swallow(False)
        wires.network.cut()

    def leaver(me):
        greet(me)
        assert greeted.wait(5)
        wires.swallow(True)
        me.wait(me.send(1, b"last", tag(2)))
        threading.Timer(0.05, cut).start()

    def stayer(me):
        greet(me)
        greeted.set()
        goal, word = me.recv(0, 4, tag(2))
        me.wait(goal)
        assert word() == b"last"

    wires.run(leaver, stayer)


def test_a_leaving_rank_stays_until_what_stands_between_has_passed_its_bytes_on():
    wires, sending, held = Wires(), threading.Event(), threading.Event()

    def tap(data):
        if sending.is_set() and data.startswith(b"PYCM") and b"last" in data:
            held.set()
            time.sleep(0.3)
        return data

    def leaver(me):
        greet(me)
        wires.network.proxies[0].tap = tap
        sending.set()
        me.wait(me.send(1, b"last", tag(2)))

    def stayer(me):
        greet(me)
        assert held.wait(5)
        for seq in range(3):  # to a rank that has gone, the proxy fails, and drops both ways
            time.sleep(0.05)
            me.send(0, b"more", tag(2 + seq))
        goal, word = me.recv(0, 4, tag(2))
        me.wait(goal)
        assert word() == b"last"

    wires.run(leaver, stayer, sockets=1)


def fill(me):
    """Send more than a connection buffers while nobody reads."""
    for _ in range(60_000):
        me.transport.ask()


@pytest.mark.parametrize("tls", ["off", "on"])
@pytest.mark.parametrize(
    ("aborts", "error", "says"),
    [
        (True, Error, "rank 0 aborted the group: the disk is full"),
        (False, PeerLost, "rank 0 .* has left the group"),
    ],
)
def test_an_end_reaches_a_rank_that_reads_late(tls, aborts, error, says):
    wires, heard, both = Wires(), threading.Event(), threading.Barrier(2)

    def ends(me):
        greet(me)
        both.wait()
        wires.hold()
        fill(me)
        if aborts:
            me.transport.abort("the disk is full")
            wires.release()
            assert heard.wait(20)
        else:
            threading.Timer(0.2, wires.release).start()

    def hears(me):
        greet(me)
        goal, _ = me.recv(0, 4, tag(2))
        both.wait()
        with pytest.raises(error, match=says):
            me.wait(goal, timeout=20)
        heard.set()

    wires.run(ends, hears, tls=tls)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_leaving_rank_waits_for_its_last_bytes(leaver):
    """Data that are cut off earlier are sent again; after the close nothing is."""
    wires, size = Wires(), 200_000  # more than a connection buffers while nobody reads
    both = threading.Barrier(2)

    def leaves(me):
        greet(me)
        both.wait()
        wires.hold()
        me.wait(me.send(1 - leaver, bytes(size), tag(2)))
        threading.Timer(0.3, wires.network.cut).start()

    def stays(me):
        greet(me)
        goal, word = me.recv(leaver, size, tag(2))
        both.wait()
        me.wait(goal)
        assert word() == bytes(size)

    wires.run(*((leaves, stays) if leaver == 0 else (stays, leaves)))


def test_a_cut_beyond_the_deadline_is_a_timeout():
    both = threading.Barrier(2)

    def job(c, network):
        x = np.ones(100_000, np.float32)
        c.all_reduce(x)
        both.wait()  # no connection is cut during the previous call
        if c.rank == 0:
            for each in network.proxies.values():
                each.silent = True
            network.cut()
        start = time.monotonic()
        with pytest.raises(Timeout, match=r"all_reduce #2 .*within the timeout of 500 ms") as error:
            c.all_reduce(x, timeout=0.5)
        assert time.monotonic() - start < 2
        return str(error.value)

    for rank, text in enumerate(good(proxy.run(2, job))):
        assert f"rank {1 - rank} does not answer" in text


def test_short_connections_are_made_with_pauses():
    def job(c, network):
        x = np.ones(100_000, np.float32)
        c.all_reduce(x)
        c.barrier()
        if c.rank == 0:
            for each in network.proxies.values():
                each.limit = 150  # hardly more than a handshake
            network.cut()
            network.before = sum(each.accepted for each in network.proxies.values())
        with pytest.raises(Timeout):
            c.all_reduce(x, timeout=1.5)
        return sum(each.accepted for each in network.proxies.values()) - network.before

    # Two sockets and control reconnect after 20, 40, 80, 100, 100 ... ms: about 20 times each, and
    # as many requests that rank 1 call back. Without pauses there would be thousands.
    counts = good(proxy.run(2, job, sockets=2))
    assert all(10 < count < 300 for count in counts), counts
