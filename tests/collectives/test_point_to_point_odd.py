"""Protocol violations of sends and receives: a faulty peer ends the group with an error that names
it, before memory is allocated for what it announces. Rank 1 is a bare transport here, without a
communicator, and sends arbitrary messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time

import numpy as np
import pytest

from pycomm import _C
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error
from tests.ranks import OPTIONS, join

SECONDS = OPTIONS["timeout"]
LANE = 1  # the lane of sends and receives
EAGER, OFFER, READY, PAYLOAD, CREDIT = range(5)
KEPT, COST, LONGEST = 1 << 20, 128, 64 << 10  # point_to_point/wire.h


class Peer:
    """Rank 1 of two: its end of the lane."""

    def __init__(self, store: Store, group: str, transport: str) -> None:
        word = store.get(f"{group}/here/0", SECONDS).decode()
        store.set(f"{group}/here/1", word)
        # A communicator publishes the host in its first value; a bare transport looks it up.
        host = word.partition("\x1etcp-host\x1f")[2].partition("\x1e")[0]
        store.set(f"{group}/tcp-host/0", host)
        self.transport = _C.Transport(transport, store, group, 1, 2, timeout=SECONDS)
        self.channel = self.transport.channel(0, LANE)
        self.tag = _C.OpTag("send", seq=0, dtype=_C.DType.uint8)
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


@pytest.fixture(params=["local", "tcp"])
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


def test_the_peer_can_talk_as_it_should(ends):
    communicator, peer = ends
    peer.says(EAGER, 8, tag=7)
    peer.sends(b"as usual")
    assert receive(communicator) == b"as usual"


def test_a_message_whose_bytes_are_still_to_come_is_for_one_receive(ends):
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


def test_a_place_takes_the_bytes_of_its_size_alone(ends):
    communicator, peer = ends
    size = LONGEST + 8
    posted = communicator.recv(np.zeros(size, np.uint8), 1, tag=7)  # published at once
    peer.says(PAYLOAD, size + 1, place=1)
    with pytest.raises(Error, match="bytes for which no receive is ready"):
        posted.wait()


def test_a_long_receive_that_has_told_its_place_is_not_met_by_a_short_message(ends):
    communicator, peer = ends
    size = LONGEST + 8
    posted = communicator.recv(np.zeros(size, np.uint8), 1, tag=7)
    peer.says(EAGER, size, tag=7)  # its bytes, then those for the address, now invalid
    with pytest.raises(Error, match=f"a short message of {size} bytes"):
        posted.wait()
