"""The formulas of an all-reduce: those of the core, and their limits."""

from __future__ import annotations

import pytest

from pycomm import _C
from pycomm.plan import CODINGS, Cluster, Link, Processor
from pycomm.plan.algorithms import Size, algorithms, all_reduce, steps
from tests.extent import each_value

GIGABIT = Link("1gbit", 125e6, 50e-6)
FREE = Processor("free", 1e15, is_core=False)


def cluster(ranks, **options):
    return Cluster(ranks=ranks, **({"inter": GIGABIT, "processor": FREE} | options))


@each_value
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "bruck", "halving_doubling", "ring"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 31, 64])
def test_the_core_counts_alike(algorithm, ranks):
    core = _C.schedule.cost(_C.OpTag("all_reduce"), ranks, 1 << 20, algorithm)
    assert steps(algorithm, ranks, 1 << 20) == pytest.approx(core[:4])


def test_a_long_message_costs_what_the_link_carries():
    cost = all_reduce(cluster(8), CODINGS["none"], "two_shot", Size(1 << 28, 4.0 * (1 << 28)))
    assert cost.seconds == pytest.approx(2 * 7 / 8 * 4 * (1 << 28) / 125e6, rel=1e-3)


def test_a_short_message_costs_its_rounds():
    cost = all_reduce(cluster(8), CODINGS["none"], "bruck", Size(1, 4.0))
    assert cost.seconds == pytest.approx(3 * 50e-6, rel=1e-2)


def test_gathering_costs_half_the_ranks_times_two_shots():
    size = Size(1 << 28, 0.08 * (1 << 28))
    gathered = all_reduce(cluster(16), CODINGS["topk:0.01"], "gather", size)
    two_shots = all_reduce(cluster(16), CODINGS["sign"], "two_shot", size)
    assert gathered.wire == pytest.approx(8 * two_shots.wire)


def test_levels_spare_the_link_between_nodes():
    nodes = cluster(32, ranks_per_node=8, intra=Link("fast", 1e12, 1e-6))
    size = Size(1 << 26, 4.0 * (1 << 26))
    flat, levels = (
        all_reduce(nodes, CODINGS["none"], name, size) for name in ("two_shot", "hierarchical")
    )
    # A node sends 2(m-1)/m b; flat, its ranks each send 2(n-1)/n b, of which 24 of 31 parts leave.
    assert levels.wire == pytest.approx(2 * 3 / 4 * 4 * (1 << 26) / 125e6)
    assert flat.wire / levels.wire == pytest.approx(8 * (2 * 31 / 32) * (24 / 31) / (2 * 3 / 4))


def test_more_ranks_than_cores_take_longer_to_code():
    size = Size(1 << 24, 0.53 * (1 << 24))
    slow = Processor("slow", 1e8)
    alone, shared = (
        all_reduce(cluster(8, processor=slow, cores=cores), CODINGS["int4"], "two_shot", size)
        for cores in (2.0, 0.25)
    )
    assert shared.seconds == pytest.approx(4 * alone.seconds, rel=0.02)


def test_only_levels_have_hierarchies():
    assert "hierarchical" not in algorithms(cluster(8), CODINGS["none"])
    assert "hierarchical" not in algorithms(cluster(8, ranks_per_node=8), CODINGS["none"])
    assert "hierarchical" in algorithms(cluster(8, ranks_per_node=4), CODINGS["int8"])


def test_sixteen_bits_travel_as_such_inside_nodes_too():
    # Twice as long in float32, on one node and on several, whichever link is the limit.
    for options in (
        {"ranks_per_node": 8, "intra": GIGABIT},
        {"ranks_per_node": 4, "intra": GIGABIT},
        {"ranks_per_node": 4, "intra": GIGABIT, "inter": Link("fast", 1e12, 1e-6)},
    ):
        nodes = cluster(8, **options)
        way = algorithms(nodes, CODINGS["none"], every=False)[-1]
        way = "two_shot" if way == "bruck" else way
        full, half = (
            all_reduce(nodes, CODINGS["none"], way, Size.of(1 << 26, CODINGS["none"], 0, width))
            for width in (4, 2)
        )
        assert half.seconds / full.seconds == pytest.approx(0.5, rel=0.01)


def test_a_bus_carries_what_all_its_ranks_send():
    size = Size(1 << 28, 4.0 * (1 << 28))
    apart, shared = (
        all_reduce(
            cluster(8, ranks_per_node=8, intra=Link("x", 1e10, 1e-6, shared=bus)),
            CODINGS["none"],
            "two_shot",
            size,
        )
        for bus in (False, True)
    )
    assert shared.wire == pytest.approx(8 * apart.wire)
