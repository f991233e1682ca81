"""Fixtures for tests that play the peer of a real rank 0."""

from __future__ import annotations

import contextlib
import struct

import pytest

from pycomm import _C
from tests.transports.ranks import Rank, tag
from tests.transports.wire_peer import HEADER, RankZero, read_exactly


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
    """Return the hash of the tag that `expect` uses, as the transport itself sends it."""
    connections = rank_0.come()
    me = Rank(0, 2, rank_0.transport)
    me.wait(me.send(1, b"", tag()))
    header = read_exactly(connections[0, 0], HEADER.size + 4)
    assert _C.crc32c(header[:-4]) == struct.unpack("<I", header[-4:])[0]
    return HEADER.unpack(header[:-4])[7]
