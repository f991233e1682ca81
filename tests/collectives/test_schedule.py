"""The choice of an algorithm by costs, and the shares of owners on unequal links."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import _C, _test
from pycomm.communicator import Piece
from pycomm.errors import Error
from tests.collectives.ways import ALGOS_OF, bits, calls, floats, integers
from tests.extent import each_pair, each_value
from tests.ranks import run

# ----------------------------------------------------------------------------------------- choice
# The cheapest algorithm that keeps the order of sums, by verified costs.


OTHER_ORDERS = {"ring"}
GROUPS = [2, 3, 4, 5, 7, 8, 13, 16, 32, 64, 257]
SIZES = [0, 8, 1000, 10_000, 100_000, 10**6, 10**8]
FLOATS = _C.DType.float32, _C.DType.bfloat16, _C.DType.complex64
REDOPS = _C.ReduceOp.sum, _C.ReduceOp.avg, _C.ReduceOp.min, _C.ReduceOp.prod

ops = pytest.mark.parametrize("op", ALGOS_OF)


def tag(op, dtype=_C.DType.float32, redop=_C.ReduceOp.sum):
    return _test.OpTag(op, dtype=dtype, redop=redop)


@ops
def test_the_cheapest_one_that_keeps_the_order_of_floats_is_chosen(op):
    reduces = op in ("all_reduce", "reduce_scatter", "reduce")
    for dtype, redop in product((*FLOATS, _C.DType.int64), REDOPS if reduces else REDOPS[:1]):
        call = tag(op, dtype, redop)
        fixed = reduces and dtype in FLOATS
        allowed = [a for a in ALGOS_OF[op] if not (fixed and a in OTHER_ORDERS)]
        for ranks, size in product(GROUPS, SIZES):
            seconds = {a: _test.schedule.cost(call, ranks, size, a)[-1] for a in allowed}
            chosen = _test.schedule.select(call, ranks, size)
            assert seconds[chosen] == min(seconds.values())


def test_bytes_that_are_summed_take_time():
    """A reduce-scatter is an all-gather that also sums what arrives."""
    sums, moves = (
        _test.schedule.cost(tag(op), 4, 10**6, "one_shot")
        for op in ("reduce_scatter", "all_gather")
    )
    assert sums[:3] == moves[:3]
    assert (sums[3], moves[3]) == (10**6, 0)
    assert sums[-1] > moves[-1]


@ops
def test_a_named_algorithm_is_used_where_it_exists(op):
    for wanted in _C.ALGOS[1:]:
        for size in SIZES:
            chosen = _test.schedule.select(tag(op), 8, size, wanted)
            if wanted in ALGOS_OF[op]:
                assert chosen == wanted
            elif wanted == "direct":
                assert chosen in ("one_shot", "two_shot")
            else:
                assert chosen == _test.schedule.select(tag(op), 8, size)


def test_an_operation_without_the_algorithm_says_so():
    with pytest.raises(Error, match="barrier has no algorithm ring"):
        _test.schedule.cost(tag("barrier"), 4, 0, "ring")
    with pytest.raises(Error, match='unknown algo "rings"; use one of auto'):
        _test.schedule.select(tag("barrier"), 4, 0, "rings")


@each_value
@pytest.mark.parametrize("ranks", [2, 4, 5, 8])
@pytest.mark.parametrize(("op", "algo"), [(op, a) for op, algos in ALGOS_OF.items() for a in algos])
def test_the_table_knows_the_bytes(op, algo, ranks):
    numel = 1680 * 16 * 8  # parts of 1 to 8 ranks are whole cache lines
    root = 0

    def job(c):
        c.barrier()
        before = c.sent_bytes()
        shared = op in ("reduce_scatter", "all_gather")
        calls(c, numel // c.size if shared else numel, root)[op]()
        return c.sent_bytes() - before

    sent = run(ranks, job, transport="shm", algo=algo)
    _, messages, expected, *_ = _test.schedule.cost(tag(op), ranks, 4 * numel, algo)
    if op in ("reduce", "all_gather", "reduce_scatter") or ranks & (ranks - 1):
        # Some rank receives what the table says, and all that is received has been sent. The table
        # assumes equal shares: a rank that acts for two may send one part more.
        part = 4 * numel / ranks if ranks & (ranks - 1) else 0
        assert max(sent) <= expected * 1.01 + 128 * messages + part
        assert sum(sent) >= expected
    else:
        assert max(sent) == pytest.approx(expected, rel=0.01, abs=128 * max(1, messages))


# ------------------------------------------------------------------------------------ unequal links
# Unequal links: shares of owners follow them, and no result changes.


RATES = ["20mbit", "100mbit", "100mbit/50mbit", "", "35mbit/1gbit", "20mbit", "100mbit", "1mbit"]
SHORT = {"segment_bytes": 52}  # of a few elements
WAYS = {
    "channels": {"transport": "shm", "algo": "two_shot"},
    "segments": {"transport": "shm", "algo": "two_shot", **SHORT},
    "tcp": {"transport": "tcp"},
}
NUMELS = [0, 1, 17, 1000, 4099, 100003]
sizes = pytest.mark.parametrize("numel", NUMELS)


def unequal(rank: int) -> dict[str, str]:
    return {"link": RATES[rank]}


# ------------------------------------------------------------------ the shares


def time_of(rates: list[float], shares: list[float]) -> float:
    n = len(rates)
    return max(((1 + (n - 2) * x) / m for m, x in zip(rates, shares, strict=True) if m), default=0)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_the_shares_reach_the_lower_bound(rates):
    """Each rank sends its buffer, and all of them together 2 (n - 1) buffers."""
    rates = [float(rate) for rate in rates]
    shares = _test.schedule.best_shares(rates)
    assert abs(sum(shares) - 1) < 1e-9
    assert min(shares) >= 0
    n = len(rates)
    if n > 1:
        bound = max(1 / min(rates), 2 * (n - 1) / sum(rates))
        # The quotients are rounded.
        assert bound * (1 - 1e-9) <= time_of(rates, shares) <= bound * (1 + 1e-9)


def test_a_rank_whose_link_bounds_the_time_owns_nothing():
    assert _test.schedule.best_shares([20, 100, 100, 100]) == [0, 1 / 3, 1 / 3, 1 / 3]
    assert _test.schedule.best_shares([20, 0, 0]) == [0, 0.5, 0.5], "0 is no limit"


@pytest.mark.parametrize("rates", [[], [5.0], [1.0, 9.0], [7.0, 7.0, 7.0], [0.0, 0.0, 0.0]])
def test_equal_links_have_equal_shares(rates):
    assert _test.schedule.best_shares(rates) == [1 / len(rates) for _ in rates]


# ------------------------------------------------------------------ results


# Sockets add nothing at the other sizes.
CASES = [
    (way, ranks, numel)
    for way in WAYS
    for ranks in ([3, 4, 8] if way == "tcp" else [2, 3, 4, 7, 8])
    for numel in ([17, 100003] if way == "tcp" else NUMELS)
]


@each_pair
@pytest.mark.parametrize(("way", "ranks", "numel"), CASES)
def test_results_keep_their_bits(way, ranks, numel):
    """All-reduce, reduce and broadcast of floats whose sums depend on the order."""

    def job(group):
        whole = floats(group.rank, numel)
        group.all_reduce(whole)
        counted = integers(group.rank, numel, "int64")
        group.all_reduce(counted)
        root = group.size - 1
        sum_ = np.zeros(numel, np.float32)
        group.reduce(floats(group.rank, numel), sum_, root=root)
        moved = floats(group.rank, numel)
        group.broadcast(moved, root=0)
        return bits(whole), bits(counted), bits(sum_) if group.rank == root else b"", bits(moved)

    expected = run(ranks, job, transport="shm", algo="two_shot")
    assert run(ranks, job, of_rank=unequal, **WAYS[way]) == expected
    assert expected[0][1] == bits(sum(integers(r, numel, "int64") for r in range(ranks)))


@each_value
@pytest.mark.parametrize(
    "codec", ["quant:bits=8", "quant:bits=4,rounding=stochastic", "topk:density=0.1", "sign"]
)
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_coded_results_and_residuals_keep_their_bits(ranks, codec):
    """The owner's residual of a value is the same, whichever rank owns it."""
    numels = [1000, 3, 0, 4099]
    total = sum(numels)

    def job(group):
        values = floats(group.rank, total)
        residuals = np.zeros((2, total), np.float32)
        pieces, at = [], 0
        for number, numel in enumerate(numels):
            worker, owner = (row[at : at + numel] for row in residuals)
            pieces.append(Piece(numel, codec, tensor=number, residual=worker, owner_residual=owner))
            at += numel
        for step in range(2):
            assert group.all_reduce_coded(values, pieces, seed=7, step=step)
        return bits(values), residuals[0], residuals[1]

    expected = run(ranks, job, transport="shm", algo="two_shot")
    found = run(ranks, job, of_rank=unequal, transport="shm", algo="two_shot", **SHORT)
    for (values, worker, _), (theirs, workers, _) in zip(found, expected, strict=True):
        assert values == theirs
        assert bits(worker) == bits(workers)
    owner, owners = (sum(rank[2] for rank in ranks_) for ranks_ in (found, expected))
    assert bits(owner) == bits(owners), "each value has one owner"


def nodes_and_rates(rank: int) -> dict[str, str]:
    return {"link": ["20mbit", "20mbit", "100mbit", "100mbit", "50mbit", "100mbit"][rank]}


@sizes
def test_nodes_share_by_their_links(numel):
    def job(group):
        whole = floats(group.rank, numel)
        group.all_reduce(whole)
        values = floats(group.rank, numel)
        group.all_reduce_coded(values, [Piece(numel, "quant:bits=8")], seed=3)
        return bits(whole), bits(values), tuple(group.core.shares)

    options = {"nodes": [0, 0, 1, 1, 2, 2], "transport": "auto"}
    expected = run(6, job, **options)
    found = run(6, job, of_rank=nodes_and_rates, **options)
    assert [rank[:2] for rank in found] == [rank[:2] for rank in expected]
    assert {rank[2] for rank in expected} == {()}
    assert len({rank[2] for rank in found}) == 1
    assert found[0][2][1] == 0, "the node behind 20 Mbit/s owns nothing"


# ------------------------------------------------------------------ bytes


def test_a_rank_behind_a_slow_link_sends_its_buffer_once():
    """1.5 buffers with equal shares among four ranks."""
    numel = 1 << 20

    def job(group):
        group.barrier()
        before = group.wire_bytes()
        group.all_reduce(np.ones(numel, np.float32))
        exact = group.wire_bytes() - before
        group.all_reduce_coded(np.ones(numel, np.float32), [Piece(numel, "quant:bits=8")])
        return exact / (4 * numel), (group.wire_bytes() - before - exact) / numel

    options = {"transport": "tcp", "algo": "two_shot"}
    for exact, coded in run(4, job, **options):
        assert 1.5 <= exact < 1.52  # frames have headers
        assert 1.5 <= coded < 1.58  # and int8 has scales
    found = run(4, job, of_rank=lambda r: {"link": "20mbit" if r == 2 else "100mbit"}, **options)
    for rank, (exact, coded) in enumerate(found):
        least = 1 if rank == 2 else 5 / 3
        assert least <= exact + 1e-4 < least + 0.02
        assert least <= coded + 1e-4 < least + 0.09


# ------------------------------------------------------------------ what ranks say


def test_describe_says_what_is_known():
    def job(group):
        return group.describe(), group.core.shares

    for text, shares in run(4, job, of_rank=lambda r: {"link": "20mbit" if r == 0 else "80mbit"}):
        assert "rates 20 80 80 80 Mbit/s, shares 0 0.333 0.333 0.333" in text
        assert shares == [0, 0, 21845, 43691, 65536]
    for text, shares in run(2, job, of_rank=lambda r: {"link": "20mbit/50mbit"}):
        assert "rates 20/50 20/50 Mbit/s" in text
        assert shares == []
    home = ["20mbit/100mbit", "100mbit/20mbit", "100mbit", "100mbit"]
    for _, shares in run(4, job, of_rank=lambda r: {"link": home[r]}):
        assert shares == [0, 0, 0, 32768, 65536], "the slower direction counts"
    for text, shares in run(3, job):
        assert "rates" not in text
        assert shares == []


# ------------------------------------------------------------------ the choice


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
)
def test_a_small_operation_takes_one_way_to_a_far_rank(op, ranks):
    for way in (0.03, 0.1):
        for size in (0, 16, 8192):
            chosen = _test.schedule.select(tag(op), ranks, size, way=way, byte=8 / 100e6)
            assert chosen == "one_shot"


def test_far_ranks_use_no_tree_and_no_ring():
    """So their order need not follow the links."""
    for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        for ranks in (2, 3, 4, 8, 16):
            for size in (0, 16, 8192, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 26):
                for way in (0.001, 0.015, 0.1):
                    for rate in (5e6, 100e6, 1e9):
                        chosen = _test.schedule.select(tag(op), ranks, size, way=way, byte=8 / rate)
                        assert chosen not in ("tree", "ring"), (op, ranks, size, way, rate)


def test_a_large_operation_sends_few_bytes():
    select = partial(_test.schedule.select, tag("all_reduce"), 4)
    for way in (0.03, 0.1):
        assert select(1 << 24, way=way, byte=4e-8) == "two_shot"
    # 2 MB take 0.48 s in one shot, and 0.44 s in two with one way more.
    far = {"way": 0.2, "byte": 8 / 100e6}
    assert select(2_000_000, **far) == "two_shot"
    assert select(1_600_000, **far) == "one_shot"
    # The best shares halve the bytes of the slowest rank.
    assert select(1_600_000, **far, shared=1.0) == "two_shot"
