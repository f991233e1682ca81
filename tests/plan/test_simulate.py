"""Events and formulas agree where both apply, and events show what formulas cannot."""

from __future__ import annotations

import pytest

from pycomm.plan import CODINGS, PROCESSORS, Cluster, Link, Processor, of_count, step
from pycomm.plan.__main__ import main
from pycomm.plan.algorithms import Size, algorithms, all_reduce
from pycomm.plan.sim import simulate
from pycomm.plan.sim.engine import Cores, EventClock, Thread, Transfer, Way
from tests.extent import each_value

# Within 2 %: formulas know of what overlaps only that it is a segment less than all.
AGREE = 0.02
FREE = Processor("free", 1e14, is_core=False)
WIRE = Link("1gbit", 119e6, 50e-6)
CODECS = ["none", "int8", "int4", "topk:0.01", "powersgd:4"]


def both(cluster, codec, algorithm, values):
    coding = CODINGS[codec]
    size = Size.of(values, coding)
    formula = all_reduce(cluster, coding, algorithm, size).seconds
    return formula, simulate.all_reduce(cluster, coding, algorithm, size)


@pytest.mark.parametrize(
    ("ranks", "values"), [(2, 250), (2, 1_000_000), (3, 1_000_000), (16, 250), (64, 1_000_000)]
)
def test_agree_where_links_are_the_limit(ranks, values):
    cluster = Cluster(ranks=ranks, inter=WIRE, processor=FREE)
    for codec in CODECS if ranks < 64 else ("none", "topk:0.01"):  # events are ranks squared
        for algorithm in algorithms(cluster, CODINGS[codec]):
            formula, events = both(cluster, codec, algorithm, values)
            assert formula == pytest.approx(events, rel=AGREE), (codec, algorithm)


@each_value
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("cores", [2.0, 0.5])
def test_agree_where_processors_are_the_limit(ranks, cores):
    fast = Link("100gbit", 12e9, 20e-6, message=8e-6, byte=0.8e-9)
    cluster = Cluster(ranks=ranks, inter=fast, cores=cores, ranks_per_machine=ranks)
    for codec in ("int8", "int4", "eden:bits=2", "sign"):
        formula, events = both(cluster, codec, "two_shot", 16_000_000)
        assert formula == pytest.approx(events, rel=AGREE), codec


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.01"])
def test_agree_on_levels(codec):
    cluster = Cluster(
        ranks=16, ranks_per_node=4, inter=WIRE, intra=Link("i", 1e10, 1e-6), processor=FREE
    )
    formula, events = both(cluster, codec, "hierarchical", 16_000_000)
    assert formula == pytest.approx(events, rel=AGREE)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_agree_on_a_bus(codec):
    bus = Link("bus", 1e9, 1e-6, shared=True)
    cluster = Cluster(ranks=8, ranks_per_node=8, inter=WIRE, intra=bus, processor=FREE)
    formula, events = both(cluster, codec, "two_shot", 16_000_000)
    assert formula == pytest.approx(events, rel=AGREE)


@pytest.mark.parametrize("codec", CODECS)
def test_agree_on_steps(codec):
    model = of_count(10_000_000, 0.05)
    cluster = Cluster(ranks=4, inter=WIRE, processor=PROCESSORS["gpu"])
    algorithm = algorithms(cluster, CODINGS[codec])[0]
    if codec == "none":
        algorithm = "two_shot"
    formula = step(model, cluster, CODINGS[codec], algorithm)
    events = simulate.step(model, cluster, CODINGS[codec], algorithm)
    assert formula.step == pytest.approx(events.step, rel=AGREE)
    assert formula.wire_bytes == pytest.approx(events.wire_bytes, rel=1e-3)


def test_everybody_waits_for_a_straggler():
    model, cluster = of_count(1_000_000, 0.1), Cluster(ranks=8, inter=Link.of("100gbe"))
    plain = simulate.step(model, cluster)
    slow = simulate.step(model, cluster, slow_ranks={3: 2.0})
    assert slow.step == pytest.approx(plain.step + 0.1, rel=0.02)
    assert simulate.step(model, cluster, slow_nodes={0: 1000.0}).step > 2 * plain.step


def test_messages_queue_on_both_ends_of_a_link():
    engine = EventClock()
    ends = [[Transfer(engine, 100.0) for _ in range(3)] for _ in range(2)]
    sends = [
        engine.task(Way(ends[0][source], ends[1][target], 0.5), 100.0, [])
        for source, target in ((0, 2), (1, 2), (0, 1))
    ]
    engine.run()
    # Two to one target: it receives one after the other. One source: it sends one after the other.
    assert [task.end for task in sends] == [1.5, 2.5, 2.5]


def test_threads_share_cores_and_take_tasks_in_turn():
    engine = EventClock()
    cores = Cores(engine, 2)
    threads = [Thread(cores) for _ in range(3)]
    first = [engine.task(thread, 1.0, []) for thread in threads]
    second = engine.task(threads[0], 1.0, [])
    engine.run()
    # Three threads on two cores have 2/3 each; the last one is alone.
    assert [task.end for task in first] == pytest.approx([1.5, 1.5, 1.5])
    assert second.end == pytest.approx(2.5)


def test_the_command_line_knows_stragglers(capsys):
    words = ["1M", "--ranks", "4", "--link", "1gbit", "--compute", "10ms", "--codec", "int8"]
    assert main([*words, "--slow-rank", "1:3"]) == 0
    assert "int8" in capsys.readouterr().out
