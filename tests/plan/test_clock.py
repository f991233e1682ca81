"""Events agree with the formulas where ranks are equal, and show how long they wait for others."""

from __future__ import annotations

import pytest

from pycomm.plan import CODINGS, PROCESSORS, Cluster, Link, clock, of_count, step
from pycomm.plan.__main__ import main
from pycomm.plan.algorithms import algorithms

WIRE = Link("1gbit", 119e6, 50e-6)


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "topk:0.01", "powersgd:4"])
@pytest.mark.parametrize("cores", [2.0, 0.5])
def test_equal_ranks_take_what_the_formulas_say(codec, cores):
    model = of_count(10_000_000, 0.05)
    cluster = Cluster(
        4, WIRE, cores=cores, compute_on_cores=cores < 1, processor=PROCESSORS["core"]
    )
    for algorithm in algorithms(cluster, CODINGS[codec]):
        formula = step(model, cluster, CODINGS[codec], algorithm)
        events = clock.step(model, cluster, CODINGS[codec], algorithm)
        assert events.step == pytest.approx(formula.step, rel=1e-9), algorithm


def test_everybody_waits_for_a_straggler():
    model, cluster = of_count(1_000_000, 0.1), Cluster(ranks=8, inter=Link.of("100gbe"))
    plain = clock.step(model, cluster)
    slow = clock.step(model, cluster, slow_ranks={3: 2.0})
    assert slow.step == pytest.approx(plain.step + 0.1, rel=0.02)
    assert clock.step(model, cluster, slow_nodes={0: 1000.0}).step > 2 * plain.step


def test_a_lane_does_one_thing_after_the_other():
    lane = clock.Lane()
    assert lane.take(2.0) == 2.0
    assert lane.take(1.0, 0.5) == 3.0
    assert lane.take(1.0, 5.0, 4.0) == 6.0
    assert lane.take(0.0, 7.0) == 7.0
    assert lane.busy(1.0, 5.5) == 2.5


def test_the_command_line_knows_stragglers(capsys):
    words = ["1M", "--ranks", "4", "--link", "1gbit", "--compute", "10ms", "--codec", "int8"]
    assert main([*words, "--slow-rank", "1:3"]) == 0
    assert "int8" in capsys.readouterr().out


# Measured on 2026-11-27: 6.3 million parameters in two ranks, links of 1 Gbit/s with 30 ms one way.
FAR = {"none": 0.439, "int8": 0.204, "int4": 0.204, "eden:bits=2": 0.138}


@pytest.mark.parametrize("codec", FAR)
def test_a_far_link_carries_a_window_in_a_round_trip(codec):
    model, cluster = of_count(6_300_000, 0.025), Cluster(2, Link.parse("1gbit,60ms"))
    found = min(
        step(model, cluster, CODINGS[codec], way).step
        for way in algorithms(cluster, CODINGS[codec], every=False)
    )
    assert found == pytest.approx(FAR[codec], rel=0.3)
    if codec == "none":  # 0.282 without the window
        assert found == pytest.approx(FAR[codec], rel=0.05)
