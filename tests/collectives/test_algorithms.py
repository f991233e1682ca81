"""Every algorithm of every collective: the right bits at every size, on any number of ranks."""

from __future__ import annotations

import re
import threading
import time
from functools import cache, partial, reduce
from operator import add

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import PeerLost, Timeout, WireMismatch
from tests.collectives.ways import (
    ALGOS_OF,
    CANONICAL,
    REDUCIBLE,
    TINY,
    TYPES,
    WAYS,
    bits,
    calls,
    check_everything,
    contribution,
    floats,
    folded,
    integers,
    right,
)
from tests.extent import pairs
from tests.ranks import attempt, run, run_processes

RANKS = [1, 2, 3, 4, 5, 7, 8]
# 804 is one segment of TINY and one that ends within a line of the cache, too, but later.
SIZES = [0, 1, 3, 17, 804, 1000, 30011]
# Algorithms to test by name; the other values of `algo` are sets of these.
ALGOS = ["one_shot", "two_shot", "bruck", "ring", "tree"]
# Algorithms whose float sums are in rank order, by operation.
RANK_ORDER = {
    "all_reduce": ["auto", "flat", "direct", "one_shot", "two_shot", "bruck", "tree"],
    "reduce_scatter": ["auto", "flat", "direct", "one_shot", "two_shot", "bruck", "tree"],
    "reduce": ["auto", "flat", "direct", "one_shot", "two_shot", "tree", "ring", "bruck"],
}
TRANSPORTS = {"channels": {"transport": "shm"}, "tcp": {"transport": "tcp", "sockets": 1}}

everywhere = pytest.mark.parametrize("ranks", RANKS)
algos = pytest.mark.parametrize("algo", ALGOS)


def rank_order(values, divisor=1):
    return reduce(add, values) / np.float32(divisor)


def everything(ranks, on=run, **options):
    """Check every collective of whole numbers at all sizes."""
    results = right(ranks, tuple(SIZES), "int32")
    on(ranks, lambda c: check_everything(c, results), **options)


# Of ranks with shared memory, auto takes the window.
@pytest.mark.parametrize(
    ("algo", "ranks", "transport"), pairs([*ALGOS, "auto"], RANKS, [*TRANSPORTS])
)
def test_every_collective_is_exact(algo, ranks, transport):
    everything(ranks, algo=algo, **TRANSPORTS[transport])


@algos
@pytest.mark.parametrize("ranks", [3, 8])
def test_every_collective_is_exact_in_tiny_segments(algo, ranks):
    everything(ranks, transport="shm", algo=algo, **TINY)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "shm"},
        {"transport": "auto"},
        {"transport": "tcp"},
        {"algo": "direct", **TINY},
        {"algo": "ring", **TINY},
        {"nodes": [0, 1, 0]},
    ],
    ids=str,
)
def test_every_collective_is_exact_between_processes(options):
    everything(3, run_processes, **options)


def float_sums(c):
    results = []
    n, root = c.size, c.size - 1
    for numel in SIZES:
        x = floats(c.rank, numel)
        c.all_reduce(x, "avg")
        part = np.empty(numel, np.float32)
        c.reduce_scatter(floats(c.rank, n * numel), part, "avg")
        out = np.empty(numel, np.float32)
        c.reduce(floats(c.rank, numel), out if c.rank == root else None, root, "avg")
        results.append((bits(x), bits(part), bits(out) if c.rank == root else b""))
    return results


IN_RANK_ORDER = [algo for algo in ("auto", "flat", *ALGOS) if algo in RANK_ORDER["reduce"]]


@cache
def means(ranks, numel):
    """Return the averages in rank order: of the input of each rank, and of wide inputs."""
    mean = rank_order([floats(r, numel) for r in range(ranks)], ranks)
    return bits(mean), rank_order([floats(r, ranks * numel) for r in range(ranks)], ranks)


@pytest.mark.parametrize(
    ("ranks", "algo", "way"),
    pairs(RANKS, IN_RANK_ORDER, ["whole", "tiny", "tcp"]),
)
def test_float_sums_are_in_rank_order(ranks, algo, way):
    more = {"whole": {"transport": "shm"}, "tiny": TINY, "tcp": TRANSPORTS["tcp"]}[way]
    outcomes = run(ranks, float_sums, algo=algo, **more)
    for rank, results in enumerate(outcomes):
        for numel, (x, part, out) in zip(SIZES, results, strict=True):
            mean, parts = means(ranks, numel)
            if algo in RANK_ORDER["all_reduce"]:
                assert x == mean, numel
            if algo in RANK_ORDER["reduce_scatter"]:
                assert part == bits(parts[rank * numel : (rank + 1) * numel]), numel
            if rank == ranks - 1:
                assert out == mean, numel


@everywhere
def test_ring_sums_have_the_same_bits_on_all_ranks(ranks):
    """The segments and the transport change nothing."""
    first, *others = (
        [x for x, _, _ in results]
        for options in ({"transport": "shm"}, TINY, TRANSPORTS["tcp"])
        for results in run(ranks, float_sums, algo="ring", **options)
    )
    assert all(other == first for other in others)


def small_values(rank, numel, dtype):
    """Return values whose sums and products of a few are exact in every dtype."""
    one = {"float16": 0x3C00, "bfloat16": 0x3F80, "float8_e4m3": 0x38, "float8_e5m2": 0x3C}
    values = np.random.default_rng([rank, numel]).integers(0, 2, numel)
    return (values * one.get(dtype, 1)).astype(TYPES[dtype])


THIRD = 1 / 3  # of a value is rounded to the dtype before it is sent, and the sum at its end


@pytest.mark.parametrize(
    ("way", "numel"),
    [
        *((way, 777) for way in (*ALGOS, "hierarchical")),
        *(("auto", numel) for numel in (5, 3000, 140_000)),  # a flag's line, one slot, and many
    ],
)
def test_every_dtype_and_op(way, numel):
    """Results are in rank order, and NaNs canonical; inputs of other ways give the same bits in
    every order."""
    ranks = 3
    options = {"transport": "shm", "algo": way, "segment_bytes": 256}
    if way == "hierarchical":
        options |= {"nodes": [0, 1, 0], "sockets": 1}
    ordered = way in RANK_ORDER["all_reduce"]

    def values(rank, numel, dtype):
        x = (contribution if ordered else small_values)(rank, numel, dtype)
        if dtype in CANONICAL and (ordered or rank == 1):
            word, _, inf = CANONICAL[dtype]
            x.view(word)[1::8] |= np.array(inf if ordered else inf | 1, word)  # Inf and NaNs
        return x

    def job(c):
        results = []
        for dtype, op in REDUCIBLE:
            x = values(c.rank, numel, dtype.name)
            c.core.run("all_reduce", x.ctypes.data, x.ctypes.data, numel, dtype, op, -1, THIRD)
            results.append(bits(x))
        return results

    want = []
    for dtype, op in REDUCIBLE:
        inputs = [values(r, numel, dtype.name) for r in range(ranks)]
        for x in inputs if op == _C.ReduceOp.premul_sum else []:
            _C.scale(dtype, x.ctypes.data, x.ctypes.data, numel, THIRD)
        want.append(bits(folded(dtype, op, inputs)))
    for results in run(ranks, job, **options):
        for combination, result, expected in zip(REDUCIBLE, results, want, strict=True):
            assert result == expected, combination


def ones(numel):
    return np.ones(numel, np.float32)


CALLS = {
    "all_reduce": lambda c: c.all_reduce(ones(1000)),
    "reduce_scatter": lambda c: c.reduce_scatter(ones(1000 * c.size), ones(1000)),
    "all_gather": lambda c: c.all_gather(ones(1000), ones(1000 * c.size)),
    "broadcast": lambda c: c.broadcast(ones(1000), 0),
    "reduce": lambda c: c.reduce(ones(1000), ones(1000), root=3),
    "barrier": lambda c: c.barrier(),
    "large all_reduce": lambda c: c.all_reduce(ones(200_000)),
    "large broadcast": lambda c: c.broadcast(ones(200_000), 0),
    "all_to_all": lambda c: c.all_to_all(np.ones(10 * c.size), np.ones(10 * c.size)),
    "coded": lambda c: c.all_reduce_coded(ones(10_000), "quant"),
}


PAIRS = [(call, algo) for call, algos in ALGOS_OF.items() for algo in algos]


def check_left(call, lost, words, ranks, **options):
    """A rank leaves instead of calling something."""

    def job(c):
        c.barrier()
        if c.rank != lost:
            for _ in range(3):  # a rank that needs nothing from it may have completed the first
                CALLS[call](c)
            c.barrier()

    for rank, outcome in enumerate(attempt(ranks, job, timeout=10, **options)):
        if rank != lost:
            assert isinstance(outcome, PeerLost), outcome
            assert re.search(words, str(outcome))


def check_missing(call, missing, ranks, **options):
    """A rank calls something after the others' time is over."""

    def job(c):
        c.barrier()
        c.timeout = 0.4
        if c.rank == missing:
            time.sleep(0.8)
        for _ in range(3):
            CALLS[call](c)
        c.barrier()

    for rank, outcome in enumerate(attempt(ranks, job, **options)):
        if rank != missing:  # which may need nothing from the ranks that timed out
            assert isinstance(outcome, Timeout), outcome
            assert f"rank {missing} is missing" in str(outcome)


@pytest.mark.parametrize(("call", "algo"), PAIRS)
def test_a_rank_that_leaves_ends_the_call_everywhere(call, algo):
    lost = 0 if call in ("broadcast", "reduce") else 2  # needed by all, and not the last root
    check_left(call, lost, r"rank \d", 5, transport="tcp", sockets=1, algo=algo)


@pytest.mark.parametrize(
    ("call", "algo"), [*PAIRS, *((call, algo) for call in CALLS for algo in ("auto", "direct"))]
)
def test_a_missing_rank_ends_the_call_everywhere(call, algo):
    check_missing(call, 2, 5, transport="shm", algo=algo)


# ------------------------------------------------------------------------------------ determinism
# The bits of a sum depend only on its inputs and the number of ranks.


NUMEL = 60_000  # two-shot over channels, several slots of the window
ORDERED = {
    "window": {"transport": "shm"},
    "one-shot": {"transport": "shm", "algo": "one_shot"},
    "two-shot": {"transport": "shm", "algo": "two_shot", "segment_bytes": 4096},
    "bruck": {"transport": "shm", "algo": "bruck"},
    "tcp, several sockets": {"transport": "tcp", "sockets": 3, "algo": "direct"},
}


@pytest.mark.parametrize("way", ORDERED)
def test_arrival_does_not_matter(way):
    """Another rank comes first in each run, and during a run ranks are delayed."""
    ranks = 3

    def job(c):
        results = []
        for turn in range(6):
            time.sleep(0.003 * ((c.rank + turn) % ranks))
            x = floats(c.rank, NUMEL)
            c.all_reduce(x, "avg")
            results.append(bits(x))
        return results

    mean, _ = means(ranks, NUMEL)
    for results in run(ranks, job, **ORDERED[way]):
        assert results == [mean] * 6


def explained_and_taken(c):
    """Return, for each call, the algorithm that is explained and the one that the trace shows."""
    found, n = [], c.size
    for numel in (1, 1000, 300_000):
        x, pieces = np.zeros(numel, np.float32), _C.Pieces()
        pieces.add(numel, _C.Codec("int8"))
        every = calls(c, numel)
        every["coded"] = partial(c.core.run_coded, "all_reduce", x.ctypes.data, 0, pieces)
        for op in (*ALGOS_OF, "coded"):
            size = {"barrier": 0, "reduce_scatter": n, "all_gather": n}.get(op, 1) * x.nbytes
            coded = pieces if op == "coded" else None
            text = c.core.explain("all_reduce" if coded else op, size, coded)
            every[op]()
            found.append((op, numel, text, c.core.trace()["records"][-1]["algo"]))
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"algo": "flat"}, {"algo": "ring"}, {"algo": "one_shot"}, {"nodes": [0, 0, 1, 1]}],
    ids=str,
)
def test_what_explain_says_is_what_is_taken(options):
    for found in run(4, explained_and_taken, transport="shm", **options):
        for op, numel, text, taken in found:
            assert text.split()[0].rstrip(":,") == taken, (op, numel, text, taken)


# -------------------------------------------------------------------------------------- premul_sum
# Every rank's data times that rank's own factor. Data are scaled before an algorithm is chosen
# (communicator.cpp), so there is one of each kind.


FACTORS = (1, 3, 2, 4, -1, -2, -3, -4)
PREMUL_WAYS = {
    "window": {},
    "one-shot": {"algo": "one_shot"},
    "tiny-ring": {"algo": "ring", **TINY},
    "tcp": TRANSPORTS["tcp"],
    "nodes": {"sockets": 1, "nodes": [5, 5, 3, 7, 7]},
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("way", PREMUL_WAYS)
def test_every_rank_scales_its_own_data(way, dtype):
    """Sums of a few small integers are whole in every dtype, in any order."""
    factors = FACTORS[: 5 if way == "nodes" else 3]
    results = right(len(factors), (*SIZES, 200_003), dtype, factors)
    run(len(factors), lambda c: check_everything(c, results, factors=factors), **PREMUL_WAYS[way])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("who", ["all", "some", "processes"])
def test_every_rank_scales_what_others_read_in_place(ranks, who):
    factors = FACTORS[:ranks]
    results = right(ranks, (3, 1024, 4099, 70001, 200_003), "float32", factors)

    def in_heap(rank):
        return who == "all" or (who == "some" and rank == 1)

    on = run_processes if who == "processes" else run
    on(ranks, lambda c: check_everything(c, results, in_heap, factors))


# ----------------------------------------------------------------------------------- parts of lists
# Every byte arrives at its place, whatever the sizes.


SEGMENTS = {"whole": {}, "tiny": TINY}
LIST_WAYS = WAYS | {
    "bruck": {"transport": "shm", "algo": "bruck"},
    "nodes": {"transport": "shm", "sockets": 1},
}


def part(source, target):
    """Return a size specific to each pair of ranks; some are zero."""
    return integers(10 * source + target, (source * target + source) % 5 * 1000)


def empty_like(arrays):
    return [np.empty_like(x) for x in arrays]


def same(arrays, want):
    return all(np.array_equal(a, b) for a, b in zip(arrays, want, strict=True))


@pytest.mark.parametrize(("way", "ranks", "segments"), pairs([*LIST_WAYS], RANKS, [*SEGMENTS]))
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
        counts = {"send_counts": [*map(len, sends)], "recv_counts": [*map(len, wanted)]}
        joined = np.empty(sum(counts["recv_counts"]), np.float32)
        c.all_to_all(np.concatenate(sends), joined, **counts)
        assert np.array_equal(joined, np.concatenate(wanted))

        out = empty_like(all_parts) if c.rank == root else None
        c.gather(mine, out, root)
        assert out is None or same(out, all_parts)
        back = np.empty_like(mine)
        c.scatter(out, back, root)
        assert np.array_equal(back, mine)

        sums = np.empty_like(mine)
        c.reduce_scatter([(c.rank + 1) * x for x in all_parts], sums)
        assert np.array_equal(sums, mine * (ranks * (ranks + 1) // 2))
        given = [x.copy() for x in all_parts]
        c.reduce_scatter(given, sums, "premul_sum", factor=FACTORS[c.rank])
        assert np.array_equal(sums, mine * sum(FACTORS[:ranks]))
        assert same(given, all_parts), "the input is the caller's"

    nodes = {"nodes": [rank % 3 for rank in range(ranks)]} if way == "nodes" else {}
    run(ranks, job, **LIST_WAYS[way], **SEGMENTS[segments], **nodes)


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
