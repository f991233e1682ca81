"""The verdict of a soak can say no; and a cycle is its seed and number."""

from __future__ import annotations

import pytest

from tests.soak.held import COUNTS, GROWTH, MEMORY, Sample, breaches, growths, held_at_rest
from tests.soak.schedule import ELDER, RANKS, draw

EVENTS = 10


def samples(**at: dict[int, int]) -> list[Sample]:
    """Forty cycles that hold as much as ever; `at` adds to a name from a cycle on."""
    made = []
    for cycle in range(40):
        held = dict.fromkeys((*MEMORY, *COUNTS), 1000)
        held["rss_kib"] += cycle % 5 * 100  # as memory does
        for name, more in at.items():
            held[name] += sum(n for first, n in more.items() if cycle >= first)
        made.append(Sample(EVENTS * (cycle + 1), ELDER, True, held))
    return made


def test_what_stays_the_same_is_flat():
    assert breaches(samples()) == []
    assert growths(samples())["heap_kib"] == 0


def test_what_is_made_once_is_not_a_leak():
    assert breaches(samples(threads={3: 2}, rss_kib={2: 50_000})) == []


@pytest.mark.parametrize("name", COUNTS)
def test_one_more_is_found(name):
    (found,) = breaches(samples(**{name: {25: 1}}))
    assert found.startswith(f"1001 {name}")


@pytest.mark.parametrize("name", MEMORY)
def test_memory_that_grows_is_found(name):
    per_cycle = int(1.5 * GROWTH * EVENTS / 100)
    (found,) = breaches(samples(**{name: dict.fromkeys(range(40), per_cycle)}))
    assert found.startswith(f"{name} grows by")


def test_a_cycle_is_its_seed_and_number():
    assert draw(1, 5) == draw(1, 5)
    assert len({str(draw(1, number)) for number in range(50)}) == 50
    whats = {event.what for number in range(50) for event in draw(1, number)}
    assert whats == {
        *("start", "restart", "kill", "abort", "codec", "cut"),
        *("groups", "mismatch", "slow", "split"),
    }
    for number in range(50):
        events = draw(1, number)
        assert [event.what for event in events[:1]] == ["start"]
        assert all(event.process != ELDER for event in events if event.what == "kill")
        assert all(sorted(e.setup.order) == [*range(RANKS)] for e in events if e.setup)


def test_what_a_process_holds_can_be_read():
    held = held_at_rest()
    assert held.keys() == {*MEMORY, *COUNTS}
    assert held["threads"] >= 1
    assert 1000 < held["heap_kib"] < held["rss_kib"]
