"""Send and receive: messages match by rank and tag in order of posting, however they arrive."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from pycomm import _C, _test
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost, WireMismatch
from tests.collectives.ways import WAYS, floats
from tests.extent import each_value
from tests.ranks import OPTIONS, attempt, join, run
from tests.soak.held import held_at_rest

everywhere = pytest.mark.parametrize("way", ["window", "tcp"])
SIZES = [0, 1, 17, 1000, 100003, 1_000_001]
floats = cache(floats)


@everywhere
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_pair_both_directions_at_once(way, ranks):
    def job(c):
        sent, received = [], []
        for numel in SIZES:
            for peer in range(ranks):
                sent.append(c.send(floats(c.rank, numel), peer, tag=numel * ranks + c.rank))
                out, source = np.empty(numel, np.float32), peer if numel % 2 else -1  # any
                received.append((c.recv(out, source, tag=numel * ranks + peer), out, peer))
        for request, out, peer in received:
            request.wait()
            assert request.source() == peer
            assert np.array_equal(out, floats(peer, out.size))
        for request in sent:
            request.wait()
            assert request.done()

    run(ranks, job, **WAYS[way])


@everywhere
def test_tags_separate_messages_in_posting_order(way):
    def job(c):
        if c.rank == 0:
            for i in range(10):
                c.send(np.full(3, i), 1, tag=i % 2).wait()
            return None
        seen = {}
        for tag in (1, 0):
            seen[tag] = []
            for _ in range(5):
                out = np.empty(3, np.int64)
                c.recv(out, 0, tag).wait()
                seen[tag].append(int(out[0]))
        return seen

    assert run(2, job, **WAYS[way])[1] == {0: [0, 2, 4, 6, 8], 1: [1, 3, 5, 7, 9]}


@everywhere
@pytest.mark.parametrize("numel", [1, 50_000], ids=["short", "long"])
def test_receives_posted_first_are_filled_first(way, numel):
    def job(c):
        if c.rank == 1:
            c.barrier()
            for i in range(4):
                c.send(np.full(numel, i), 0).wait()
            return None
        outs = [np.empty(numel, np.int64) for _ in range(4)]
        requests = [c.recv(out, src) for out, src in zip(outs, (1, -1, 1, -1), strict=True)]
        c.barrier()
        for request in reversed(requests):
            request.wait()
        return [set(out.tolist()) for out in outs]

    assert run(2, job, **WAYS[way])[0] == [{0}, {1}, {2}, {3}]


@each_value
@everywhere
@pytest.mark.parametrize(("count", "numel"), [(60, 50_000), (4000, 500)], ids=["long", "short"])
def test_receiver_keeps_little_of_what_nobody_receives(way, count, numel):
    def job(c):
        if c.rank == 0:
            before = c.sent_bytes()
            requests = [c.send(floats(i % 7, numel), 1, tag=i) for i in range(count)]
            requests.append(c.send(floats(0, 1), 1, tag=count))
            c.barrier()
            sent = c.sent_bytes() - before
            c.barrier()
            for request in requests:
                request.wait()
            return sent
        # Messages sent earlier have arrived as well.
        c.recv(np.empty(1, np.float32), 0, tag=count).wait()
        c.barrier()
        c.barrier()
        for i in reversed(range(count)):
            out = np.empty(numel, np.float32)
            c.recv(out, 0, tag=i).wait()
            assert np.array_equal(out, floats(i % 7, numel))

    # The limit is 1 MiB of bytes plus headers; the messages have 12 and 8 MB.
    assert run(2, job, **WAYS[way])[0] < 2.5e6


@everywhere
def test_messages_that_were_received_make_room_for_others(way):
    """Each wave is more than a receiver keeps, and none of it is received before all is sent.

    Its last messages, a short and a long one, have a tag and receives that are posted before.
    """
    count, numel, last = 80, 4000, (100, 100_003)

    def job(c):
        for wave in range(3):
            outs = [np.empty(n, np.float32) for n in last]
            if c.rank == 0:
                requests = [c.send(floats(wave + i % 7, numel), 1, tag=i) for i in range(count)]
                c.barrier()
                requests += [c.send(floats(wave, n), 1, tag=count) for n in last]
            else:
                requests = [c.recv(out, 0, tag=count) for out in outs]
                c.barrier()
            c.barrier()
            for i in reversed(range(count if c.rank == 1 else 0)):
                out = np.empty(numel, np.float32)
                c.recv(out, 0, tag=i).wait()
                assert np.array_equal(out, floats(wave + i % 7, numel))
            for request in requests:
                request.wait()
            for out in outs if c.rank == 1 else []:
                assert np.array_equal(out, floats(wave, out.size))

    run(2, job, **WAYS[way])


@everywhere
def test_long_messages_meet_in_any_order(way):
    # Pipelines and batch_isend_irecv post all at once, and wait for them in turn.
    numel = 200_003

    def job(c):
        peer = 1 - c.rank
        sends = [c.send(floats(c.rank + 2 * i, numel), peer, tag=i) for i in range(3)]
        outs = [np.empty(numel, np.float32) for _ in range(3)]
        for i in (2, 0, 1):
            c.recv(outs[i], -1 if i == 0 else peer, tag=i).wait()
        for send in sends:
            send.wait()
        for i, out in enumerate(outs):
            assert np.array_equal(out, floats(peer + 2 * i, numel))

    run(2, job, **WAYS[way])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_may_send_to_itself(ranks):
    def job(c):
        first = np.empty(3, np.float32)
        early = c.recv(first, c.rank, tag=1)
        c.send(np.full(3, 1, np.float32), c.rank, tag=1).wait()
        c.send(np.full(3, 2, np.float32), c.rank, tag=2).wait()
        second = np.empty(3, np.float32)
        late = c.recv(second, tag=2)
        early.wait()
        late.wait()
        assert (early.source(), late.source()) == (c.rank, c.rank)
        return first[0], second[0]

    assert run(ranks, job) == [(1, 2)] * ranks


@everywhere
def test_requests_complete_although_nobody_waits(way):
    numel = 1_000_001

    def job(c):
        out = np.empty(numel, np.float32)
        requests = [c.send(floats(c.rank, numel), 1 - c.rank), c.recv(out, 1 - c.rank)]
        end = time.monotonic() + 10
        while not all(request.done() for request in requests):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert np.array_equal(out, floats(1 - c.rank, numel))
        c.barrier()

    run(2, job, **WAYS[way])


@everywhere
def test_a_posted_receive_is_not_in_the_way_of_collectives(way):
    def job(c):
        out = np.empty(1000, np.float32)
        request = c.recv(out, 1 - c.rank)
        for i in range(50):
            x = np.full(1000, c.rank + i, np.float32)
            c.all_reduce(x)
            assert x[0] == 2 * i + 1
        c.send(np.full(1000, c.rank, np.float32), 1 - c.rank).wait()
        request.wait()
        assert out[0] == 1 - c.rank

    run(2, job, **WAYS[way])


@everywhere
def test_threads_of_a_rank_may_talk_while_another_reduces(way):
    rounds, lanes = 30, 3

    def job(c):
        def talk(tag):
            out = np.empty(100, np.float32)
            for i in range(rounds):
                request = c.recv(out, 1 - c.rank, tag)
                c.send(np.full(100, tag * 1000 + i, np.float32), 1 - c.rank, tag).wait()
                request.wait()
                assert out[0] == tag * 1000 + i

        with ThreadPoolExecutor(lanes) as pool:
            talks = [pool.submit(talk, tag) for tag in range(lanes)]
            for i in range(rounds):
                x = np.full(10_000, i, np.float32)
                c.all_reduce(x)
                assert x[0] == 2 * i
            for done in talks:
                done.result()

    run(2, job, **WAYS[way])


@everywhere
@pytest.mark.parametrize("first", ["send", "recv"])
def test_sizes_that_differ_are_an_error_at_both_ends(way, first):
    def job(c):
        if first == "recv" and c.rank == 0:
            time.sleep(0.05)
        if first == "send" and c.rank == 1:
            c.barrier()
        data = np.zeros(4 if c.rank == 0 else 3, np.float32)
        request = c.send(data, 1) if c.rank == 0 else c.recv(data, 0)
        if first == "send" and c.rank == 0:
            c.barrier()
        request.wait()
        c.barrier()

    text = "recv of 12 bytes from rank 0 (tag 0) does not match a send of 16 bytes"
    for error in attempt(2, job, **WAYS[way]):
        assert isinstance(error, WireMismatch)
        assert text in str(error)


@everywhere
def test_a_receive_from_any_rank_that_is_posted_after_all_have_left(way):
    def job(c):
        c.barrier()
        if c.rank == 1:
            return
        noticed = c.recv(np.empty(1), 1, tag=1)
        while not noticed.done():
            time.sleep(0.001)
        with pytest.raises(PeerLost, match=r"rank 1 .*left"):
            c.recv(np.empty(1), tag=2).wait(5)

    run(2, job, **WAYS[way])


def test_ranks_that_do_not_exist_are_refused():
    def job(c):
        x = np.zeros(3)
        with pytest.raises(Error, match="destination 2 in a group of 2"):
            c.send(x, 2)
        with pytest.raises(Error, match="source -2 in a group of 2"):
            c.recv(x, -2)
        c.barrier()

    run(2, job)


def test_an_undone_receive_leaves_no_memory():
    def groups(count: int) -> None:
        for _ in range(count):
            with Communicator(None, 0, 1) as communicator:
                communicator.recv(np.zeros(8), 0)

    groups(50)  # for allocations that are made once
    before = held_at_rest()["heap_kib"]
    groups(500)
    assert held_at_rest()["heap_kib"] - before < 100  # 2 KiB each would be a thousand


# ---------------------------------------------------------------- a peer that breaks the protocol
# It ends the group with an error that names it, before memory is allocated for what it announces.
# Rank 1 is a bare transport here, without a
# communicator, and sends arbitrary messages.


SECONDS = OPTIONS["timeout"]
LANE = 1  # the lane of sends and receives
EAGER, OFFER, READY, PAYLOAD, CREDIT = range(5)
KEPT, COST, LONGEST = 1 << 20, 128, 64 << 10  # point_to_point/wire.h
LONG = LONGEST + 8


class Peer:
    """Rank 1 of two: its end of the lane."""

    def __init__(self, store: Store, group: str, transport: str) -> None:
        word = store.get(f"{group}/here/0", SECONDS).decode()
        store.set(f"{group}/here/1", word)
        # A communicator announces more with its first value, which a bare transport looks up.
        for item in word.split("\x1e")[1:]:
            topic, _, value = item.partition("\x1f")
            store.set(f"{group}/{topic}/0", value)
        self.transport = _test.Transport(transport, store, group, 1, 2, timeout=SECONDS)
        self.channel = self.transport.channel(0, LANE)
        self.tag = _test.OpTag("send", seq=0, dtype=_C.DType.uint8)
        self.sent: list[ctypes.Array[ctypes.c_char]] = []  # must stay alive until it is sent
        self.lock, self.over = threading.Lock(), threading.Event()
        self.drives = threading.Thread(target=self.drive, daemon=True)
        self.drives.start()

    def drive(self) -> None:
        with contextlib.suppress(Error):  # rank 0 ends the group
            while not self.over.wait(0.0005):
                with self.lock:
                    self.channel.progress()

    def close(self) -> None:
        self.over.set()
        assert not join([self.drives], SECONDS)
        self.transport.close()

    def says(self, kind: int, size: int = 0, tag: int = 0, place: int = 0) -> None:
        self.sends(struct.pack("=QqQII", size, tag, place, kind, 0))

    def sends(self, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self.sent.append(buffer)
        with self.lock:
            self.channel.send(self.tag, ctypes.addressof(buffer), len(data))


@pytest.fixture(params=["shm", "tcp"])
def ends(request):
    """Return rank 0's communicator, and its peer."""
    store = Store.local()
    peers: list[Peer] = []
    meets = threading.Thread(
        target=lambda: peers.append(Peer(store, "odd", request.param)), daemon=True
    )
    meets.start()
    with Communicator(store, 0, 2, **{**OPTIONS, "group": "odd", "transport": request.param}) as c:
        assert not join([meets], SECONDS)
        yield c, peers[0]
        peers[0].close()


def receive(communicator: Communicator, size: int = 8) -> bytes:
    out = np.zeros(size, np.uint8)
    communicator.recv(out, 1, tag=7).wait()
    return out.tobytes()


def test_an_incomplete_message_has_one_receive(ends):
    communicator, peer = ends
    driven = communicator.recv(np.zeros(8, np.uint8), 1, tag=9)  # so that rank 0 looks at the lane
    peer.says(EAGER, 8, tag=7)
    time.sleep(0.05)  # the header arrives; if it does not, the receives below find nothing
    outs = [np.zeros(8, np.uint8) for _ in range(2)]
    requests = [communicator.recv(out, 1, tag=7) for out in outs]
    peer.sends(b"to first")
    peer.says(EAGER, 8, tag=7)
    peer.sends(b"the next")
    peer.says(EAGER, 8, tag=9)
    peer.sends(b"any more")
    for request in (*requests, driven):
        request.wait()
    assert [out.tobytes() for out in outs] == [b"to first", b"the next"]


@pytest.mark.parametrize("size", [LONGEST + 1, 1 << 31, (1 << 64) - 1])
def test_a_short_message_that_is_long_gets_no_room(ends, size):
    communicator, peer = ends
    peer.says(EAGER, size, tag=1)
    with pytest.raises(Error, match=rf"rank 1 sends a short message of {size} bytes; install"):
        receive(communicator)


@pytest.mark.parametrize("size", [0, 1000, LONGEST])
def test_no_more_is_kept_than_the_bound(ends, size):
    communicator, peer = ends
    fits = KEPT // (size + COST)
    for _ in range(fits):
        peer.says(EAGER, size, tag=1)
        if size:
            peer.sends(bytes(size))
    peer.says(OFFER, 8, tag=7)  # offers are not stored
    posted = communicator.recv(np.zeros(8, np.uint8), 1, tag=7)
    assert not posted.done()
    peer.says(EAGER, size, tag=1)
    with pytest.raises(Error, match="rank 1 sends more short messages than it may"):
        posted.wait()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"kind": 5}, "a message of an unknown kind"),
        ({"kind": 0xFFFFFFFF}, "a message of an unknown kind"),
        ({"kind": PAYLOAD, "size": 8, "place": 1}, "bytes for which no receive is ready"),
        ({"kind": PAYLOAD, "size": 8}, "bytes for which no receive is ready"),
    ],
)
def test_what_means_nothing_ends_the_group(ends, said, text):
    communicator, peer = ends
    peer.says(**said)
    with pytest.raises(Error, match=f"rank 1 sends {text}"):
        receive(communicator)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"kind": PAYLOAD, "size": LONG + 1, "place": 1}, "bytes for which no receive is ready"),
        ({"kind": EAGER, "size": LONG, "tag": 7}, f"a short message of {LONG} bytes"),
    ],
)
def test_a_published_receive_takes_the_bytes_of_its_size_alone(ends, said, text):
    communicator, peer = ends
    posted = communicator.recv(np.zeros(LONG, np.uint8), 1, tag=7)  # published at once
    peer.says(**said)
    with pytest.raises(Error, match=text):
        posted.wait()
