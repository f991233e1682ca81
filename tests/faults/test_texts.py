"""Errors that end a group agree on every rank: the cause, and the state of all ranks."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from pycomm.errors import PeerLost, Timeout, WireMismatch
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt

WAYS = {**WAYS, "shm": {"transport": "shm"}}
ways = pytest.mark.parametrize("way", ["window", "shm", "direct", "tcp"])
all_ranks = pytest.mark.parametrize("ranks", [2, 3, 4])


def ones(numel):
    return np.ones(numel, np.float32)


def ranks_text(ranks, one, many):
    """Return "rank 0 waits" or "ranks 0-2 wait"."""
    if ranks == 1:
        return f"rank 0 {one}"
    return f"ranks 0-{ranks - 1} {many}"


def texts_of(errors, kind):
    """Return the error texts, which are equal unless several ranks detect the failure at once.

    Each of these reports it from its own view, and the other ranks get one of their texts.
    """
    errors = [error for error in errors if error is not None]
    assert errors
    assert all(type(error) is kind for error in errors)
    texts = {str(error) for error in errors}
    assert len({text.partition("\n")[2] for text in texts}) == 1  # all texts have one table
    return texts


@each_value
@ways
@all_ranks
def test_a_missing_rank(way, ranks):
    over = threading.Barrier(ranks)

    def job(c):
        c.barrier()
        try:
            if c.rank < ranks - 1:
                c.all_reduce(ones(10), timeout=0.3)
        finally:
            over.wait(10)

    call = re.escape("all_reduce #2 (sum of 10 float32)")
    for text in texts_of(attempt(ranks, job, **WAYS[way]), Timeout):
        assert re.fullmatch(
            rf"rank [0-{ranks - 2}]: {call} did not end within the timeout of 300 ms\n"
            rf"  rank {ranks - 1} is missing: in no operation, last completed barrier #1\n"
            rf"  {ranks_text(ranks - 1, 'waits', 'wait')}: in {call}, last completed barrier #1",
            text,
        )


@ways
@all_ranks
def test_a_rank_that_calls_something_else(way, ranks):
    def job(c):
        c.barrier()
        c.all_reduce(ones(1000 if c.rank < ranks - 1 else 999))
        c.barrier()

    ours, theirs = (f"all_reduce #2 (sum of {n} float32)" for n in (1000, 999))
    end = (
        r"rank \d (calls|(expects|sends) \d+ bytes of) all_reduce #2 \(sum of (999|1000) float32\)"
    )
    last = "last completed barrier #1"
    lines = [
        f"  {ranks_text(ranks - 1, '', '').strip()}: in {ours}, {last}",
        f"  rank {ranks - 1}: in {theirs}, {last}",
    ]
    if ranks > 2:  # with two ranks, neither is known to be right
        lines = [f"  rank {ranks - 1} differs: in {theirs}, {last}", lines[0]]
    for text in texts_of(attempt(ranks, job, **WAYS[way]), WireMismatch):
        first, *table = text.splitlines()
        assert re.fullmatch(f"{end}, {end}", first)
        assert table == lines


@ways
def test_both_ends_of_a_receive_that_nobody_sends_to(way):
    def job(c):
        c.barrier()
        if c.rank == 0:
            c.recv(ones(20), 1, tag=3).wait(0.3)
        elif c.rank == 1:
            c.recv(ones(10), 0, tag=4).wait(10)
        else:
            c.all_reduce(ones(10))

    assert texts_of(attempt(3, job, **WAYS[way]), Timeout) == {
        "rank 0: recv of 80 bytes from rank 1 (tag 3) did not end within the timeout of 300 ms; "
        "check that the other end sends with the same tag\n"
        "  rank 0: in recv of 80 bytes from rank 1 (tag 3), last completed barrier #1\n"
        "  rank 1: in recv of 40 bytes from rank 0 (tag 4), last completed barrier #1\n"
        "  rank 2: in all_reduce #2 (sum of 10 float32), last completed barrier #1"
    }


@ways
def test_what_a_rank_was_about_to_receive_from_one_that_has_left(way):
    left = threading.Event()

    def job(c):
        c.barrier()
        if c.rank == 1:
            return
        left.wait(10)
        c.recv(ones(4), 1).wait()

    threading.Timer(0.1, left.set).start()
    error, _ = attempt(2, job, **WAYS[way])
    assert (type(error), error.rank) == (PeerLost, 1)
    was = "rank 0: in recv of 16 bytes from rank 1 (tag 0), last completed barrier #1"
    assert was in str(error)
