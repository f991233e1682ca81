"""Collectives without reduction: every byte arrives at its place, on every way."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pycomm.errors import WireMismatch
from tests.collectives.ways import RANKS, TINY, WAYS, integers
from tests.extent import pairs
from tests.ranks import attempt, run

SIZES = [0, 1, 3, 17, 1000, 30011]
SEGMENTS = {"whole": {}, "tiny": TINY}
ways = pytest.mark.parametrize("way", WAYS)
everywhere = pytest.mark.parametrize("ranks", RANKS)


def with_each(name, values):
    """Run a test on every way with every number of ranks, which take turns with these values."""
    return pytest.mark.parametrize(("way", "ranks", name), pairs([*WAYS], RANKS, values))


with_segments = with_each("segments", [*SEGMENTS])


@ways
@everywhere
def test_uneven_all_to_all(way, ranks):
    def part(source, target):
        return integers(10 * source + target, (source * target) % 5 * 100)

    def job(c):
        sends = [part(c.rank, r) for r in range(ranks)]
        want = [part(r, c.rank) for r in range(ranks)]
        out = np.empty(sum(map(len, want)), np.float32)
        c.all_to_all(
            np.concatenate(sends),
            out,
            send_counts=[len(x) for x in sends],
            recv_counts=[len(x) for x in want],
        )
        return np.array_equal(out, np.concatenate(want))

    assert all(run(ranks, job, **WAYS[way]))


def part(source, target):
    """Return a size specific to each pair of ranks; some are zero."""
    return integers(10 * source + target, (source * target + source) % 5 * 1000)


def empty_like(arrays):
    return [np.empty_like(x) for x in arrays]


def same(arrays, want):
    return all(np.array_equal(a, b) for a, b in zip(arrays, want, strict=True))


@with_segments
def test_lists_of_any_sizes(way, ranks, segments):
    root = ranks // 2

    def job(c):
        everyone = range(ranks)
        mine = part(c.rank, 1)
        all_parts = [part(r, 1) for r in everyone]
        out = empty_like(all_parts)
        c.all_gather(mine, out)
        assert same(out, all_parts)
        c.all_gather(out[c.rank], out)
        assert same(out, all_parts), "in place"

        sends, wanted = [part(c.rank, r) for r in everyone], [part(r, c.rank) for r in everyone]
        out = empty_like(wanted)
        c.all_to_all(sends, out)
        assert same(out, wanted)

        out = empty_like(all_parts) if c.rank == root else None
        c.gather(mine, out, root)
        assert out is None or same(out, all_parts)
        back = np.empty_like(mine)
        c.scatter(out, back, root)
        assert np.array_equal(back, mine)

        sums = np.empty_like(mine)
        c.reduce_scatter([(c.rank + 1) * x for x in all_parts], sums)
        assert np.array_equal(sums, mine * (ranks * (ranks + 1) // 2))

    run(ranks, job, **WAYS[way], **SEGMENTS[segments])


SIZES_THAT_DIFFER = {
    "all_gather": (
        lambda c, n: c.all_gather(np.ones(n[c.rank]), [np.ones(k) for k in n]),
        ["all_gather #1 (6 float64, parts of 1,2,3)", "all_gather #1 (7 float64, parts of 1,2,4)"],
    ),
    "reduce_scatter": (
        lambda c, n: c.reduce_scatter([np.ones(k) for k in n], np.ones(n[c.rank])),
        ["reduce_scatter #1 (sum of 6 float64, parts of 1,2,3)", "parts of 1,2,4"],
    ),
    "all_to_all": (
        lambda c, n: c.all_to_all([np.ones(k) for k in n], [np.ones(n[c.rank]) for _ in n]),
        ["rank 2 ", " 32 bytes of all_to_all #1", " 24 bytes of all_to_all #1"],
    ),
    "gather": (
        lambda c, n: c.gather(np.ones(n[c.rank]), [np.ones(k) for k in n]),
        ["rank 0", "rank 2", " 24 bytes of gather #1", " 32 bytes of gather #1"],
    ),
    "scatter": (
        lambda c, n: c.scatter([np.ones(k) for k in n], np.ones(n[c.rank])),
        ["rank 0", "rank 2", " 32 bytes of scatter #1", " 24 bytes of scatter #1"],
    ),
}


@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
@pytest.mark.parametrize("op", SIZES_THAT_DIFFER)
def test_sizes_that_differ_are_named_on_every_rank(way, op):
    call, words = SIZES_THAT_DIFFER[op]

    def job(c):
        call(c, [1, 2, 4 if c.rank == 2 else 3])
        c.barrier()  # a rank whose own sizes are right gets the error here

    outcomes = attempt(3, job, **WAYS[way])
    for outcome in outcomes:
        assert isinstance(outcome, WireMismatch), outcome
        assert all(word in str(outcome) for word in words), outcome


@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_nobody_leaves_a_barrier_before_the_last_has_come(way, ranks):
    arrived = []
    lock = threading.Lock()

    def job(c):
        for late in range(ranks):
            if c.rank == late:
                time.sleep(0.02)
            with lock:
                arrived.append(late)
            c.barrier()
            with lock:
                assert arrived.count(late) == ranks
            c.barrier()

    run(ranks, job, **WAYS[way])
