"""Hierarchical collectives: right bits in one order at every size, and bytes over a link once."""

from __future__ import annotations

import threading
import time
from functools import reduce
from operator import add

import numpy as np
import pytest

from pycomm.errors import Error, Timeout, WireMismatch
from tests.collectives.test_algorithms import (
    CALLS,
    SIZES,
    check_left,
    check_missing,
    everything,
    float_sums,
    ones,
)
from tests.collectives.ways import TINY, bits, floats
from tests.extent import part
from tests.ranks import attempt, run

# The node of each rank: equal and unequal nodes, in order and mixed, and a node of one rank.
NODES = {
    "2+2": [0, 0, 1, 1],
    "mixed": [0, 1, 0, 1],
    "1+3": [0, 1, 1, 1],
    "3+1": [0, 0, 0, 1],
    "2+1+2": [5, 5, 3, 7, 7],
    "4+4": [0, 0, 0, 0, 1, 1, 1, 1],
    "3+2+2": [0, 1, 2, 0, 1, 2, 0],
    "flat": [0, 1, 2],
    "one": [4, 4, 4],
}
# Hosts near each other are a site, and reduce among themselves first: the site of each rank, and
# its node where some share memory.
SITES = {name: (sites, list(range(len(sites)))) for name, sites in NODES.items() if name != "one"}
SITES["hosts of two ranks"] = [0, 0, 0, 1, 1], [0, 0, 1, 2, 2]
SITES["a host among three"] = [0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 3, 4, 5]


def options(name, **more):
    return {"transport": "shm", "sockets": 1, "nodes": NODES[name], **more}


def sited(name, **more):
    sites, nodes = SITES[name]
    return {"transport": "shm", "sockets": 1, "nodes": nodes, "sites": sites, **more}


# The node or site of each rank, which reduces first, and the options of the group. Inside a site
# sums are in rank order, whatever shares memory.
PLACES = {name: (nodes, options(name)) for name, nodes in NODES.items()}
PLACES |= {f"sites {name}": (sites, sited(name)) for name, (sites, _) in SITES.items()}


def node_order(nodes, values, divisor):
    """Return sums in hierarchical order: ranks of a node, then nodes by their first rank."""
    sums = {}
    for node, value in zip(nodes, values, strict=True):
        sums[node] = sums[node] + value if node in sums else value.copy()
    return reduce(add, sums.values()) / np.float32(divisor)


def check_sums(order, outcomes):
    """Check the results of `float_sums`: those of every rank are summed in the nodes' order."""
    n = len(order)
    for i, numel in enumerate(SIZES):
        mean = bits(node_order(order, [floats(r, numel) for r in range(n)], n))
        parts = node_order(order, [floats(r, n * numel) for r in range(n)], n)
        for results in outcomes:
            for rank in range(n):
                x, own, out = results[rank][i]
                assert x == mean, numel
                assert own == bits(parts[rank * numel : (rank + 1) * numel]), numel
                assert out == (mean if rank == n - 1 else b""), numel


# Here and in the sums of floats, places take turns with the segments, the other way round there.
SEGMENTS = {"whole": {}, "tiny": TINY}


@pytest.mark.parametrize(
    ("place", "kind"),
    [(name, kind) for number, name in enumerate(PLACES) for kind in part([*SEGMENTS], 2, number)],
)
def test_every_collective_is_exact(place, kind):
    order, more = PLACES[place]
    everything(len(order), **more, **SEGMENTS[kind])


@pytest.mark.parametrize("algo", ["flat", "ring"])
def test_flat_algorithms_run_over_both_transports(algo):
    everything(5, **options("2+1+2", algo=algo))


@pytest.mark.parametrize("place", PLACES)
def test_float_sums_have_one_order_at_every_size(place):
    order, more = PLACES[place]
    turns = part([*SEGMENTS.values()], 2, [*PLACES].index(place) + 1)
    check_sums(order, [run(len(order), float_sums, **more, **kind) for kind in turns])


def wire_bytes(name, call, numel):
    """Return the bytes that each node sends, minus those of an empty call."""

    def job(c):
        c.barrier()
        before = c.wire_bytes()
        call(c, numel)
        sent = c.wire_bytes() - before
        c.barrier()  # answers to closes count, so wait for them
        return sent

    sent: dict[int, int] = {}
    for node, wire in zip(NODES[name], run(len(NODES[name]), job, **options(name)), strict=True):
        sent[node] = sent.get(node, 0) + wire
    return list(sent.values())


@pytest.mark.parametrize("name", ["2+2", "1+3", "4+4", "2+1+2"])
def test_each_byte_crosses_a_link_once(name):
    order = NODES[name]
    n, m = len(order), len(set(order))
    numel = 240_000
    size = 4 * numel
    headers = 0.02  # of frames, for segments of this size
    for sent in wire_bytes(name, lambda c, k: c.all_reduce(ones(k)), numel):
        assert sent == pytest.approx(2 * (m - 1) / m * size, rel=headers)
    local = [order.count(node) for node in dict.fromkeys(order)]
    scatters = wire_bytes(name, lambda c, k: c.reduce_scatter(ones(k * c.size), ones(k)), numel)
    for ranks, sent in zip(local, scatters, strict=True):
        assert sent == pytest.approx((n - ranks) * size, rel=headers)
    gathers = wire_bytes(name, lambda c, k: c.all_gather(ones(k), ones(k * c.size)), numel)
    for ranks, sent in zip(local, gathers, strict=True):
        assert sent == pytest.approx((m - 1) * ranks * size, rel=headers)
    root = n - 1
    broadcast = wire_bytes(name, lambda c, k: c.broadcast(ones(k), root), numel)
    assert sum(broadcast) == pytest.approx((m - 1) * size, rel=headers)
    assert max(broadcast) <= (1 + headers) * size


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lost", [1, 3])
def test_a_rank_that_leaves_ends_the_call_everywhere(call, lost):
    check_left(call, lost, f"rank {lost}", 4, **options("2+2"))


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_rank_ends_the_call_everywhere(call):
    check_missing(call, 3, 4, **options("2+2"))


@pytest.mark.parametrize("numel", [10, 100_000])
def test_the_time_of_a_call_counts_from_its_begin(numel):
    """However long the ranks of a node wait for each other before they wait for another node."""
    called, over = threading.Event(), threading.Event()

    def job(c):
        c.barrier()
        if c.rank > 0:
            assert called.wait(10)
        if c.rank == 1:
            time.sleep(3.0)
        if c.rank > 1:
            over.wait(6.0)
        called.set()
        try:
            c.all_reduce(np.ones(numel, np.float32), timeout=4.0)
        finally:
            over.set()

    for outcome in attempt(4, job, **options("2+2")):
        assert isinstance(outcome, Timeout), outcome
        assert "within the timeout of 4000 ms" in str(outcome)


@pytest.mark.parametrize("differs", range(4))
@pytest.mark.parametrize("sizes", [(500, 1000), (500_000, 1_000_000)], ids=["small", "large"])
def test_ranks_that_call_different_things_hear_of_both(differs, sizes):
    def job(c):
        c.all_reduce(np.ones(sizes[c.rank == differs], np.float32))

    for outcome in attempt(4, job, **options("2+2", timeout=10)):
        assert isinstance(outcome, WireMismatch), outcome
        assert str(sizes[0]) in str(outcome)
        assert str(sizes[1]) in str(outcome)


@pytest.mark.parametrize("name", ["2+2", "2+1+2"])
def test_bytes_travel_while_ranks_wait_inside_their_node(name):
    """A slow link still holds a rank's data when its node's next step begins.

    In that step the rank waits in shared memory for a rank that waits for another node, and so on.
    This circle is a deadlock unless the first rank continues to send.
    """

    def job(c):
        x = np.ones(1 << 20, np.float32)
        for _ in range(3):
            c.all_reduce(x, "avg")
            out = np.empty(len(x) * c.size // 4, np.float32)
            c.all_gather(x[: len(x) // 4], out)
        return bits(x) == bits(np.ones_like(x)) and bool((out == 1).all())

    assert all(run(len(NODES[name]), job, **options(name, link="50MB")))


def test_sites_with_unequal_links_keep_their_bits():
    def reduce(c):
        x = floats(c.rank, 30011)
        c.all_reduce(x)
        return bits(x), c.core.shares

    links = ["20mbit/20mbit"] * 2 + ["100mbit/100mbit"] * 4
    six = {"transport": "tcp", "sites": [0, 0, 1, 1, 2, 2]}
    expected = run(6, reduce, **six)
    found = run(6, reduce, of_rank=lambda rank: {"link": links[rank]}, **six)
    assert [rank[0] for rank in found] == [rank[0] for rank in expected]
    assert {tuple(rank[1]) for rank in found} == {(0, 0, 32768, 65536)}


def test_describe_and_levels_tell_the_sites():
    for text, levels in run(4, lambda c: (c.describe(), c.core.levels), **sited("mixed")):
        assert text.endswith("; 2 sites: 0,2 | 1,3")
        assert levels == [0, 1, 0, 1]
    for text, levels in run(3, lambda c: (c.describe(), c.core.levels), **sited("flat")):
        assert "sites" not in text, "each host is a site of its own"
        assert levels == []
    assert run(4, lambda c: c.core.levels, **sited("mixed", algo="flat")) == [[]] * 4


def test_wrong_nodes_and_sites_are_refused():
    for what in ("nodes", "sites"):
        with pytest.raises(Error, match=f"3 {what} are declared for 2 ranks"):
            run(2, lambda c: None, transport="tcp", **{what: [0, 0, 1]})
    for error in attempt(2, lambda c: None, of_rank=lambda rank: {"sites": [0, rank]}):
        assert isinstance(error, WireMismatch)
        assert "sites=0,0" in str(error)
        assert "sites=0,1" in str(error)
