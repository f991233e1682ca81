"""The verdict of a soak can say no; and a case is its seed and number."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import ELDER, FAULTS, draw
from tests.soak.held import COUNTS, GROWTH, MEMORY, Sample, breaches, growths, held_at_rest


def samples(**at: dict[int, int]) -> list[Sample]:
    """Forty cases that hold as much as ever; `at` adds to a name from a case on."""
    made = []
    for case in range(40):
        held = dict.fromkeys((*MEMORY, *COUNTS), 1000)
        held["rss_kib"] += case % 2 * 100  # as memory does
        for name, more in at.items():
            held[name] += sum(n for first, n in more.items() if case >= first)
        made.append(Sample(case + 1, held))
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
    more = int(1.5 * GROWTH[name] / 100)
    (found,) = breaches(samples(**{name: dict.fromkeys(range(40), more)}))
    assert found.startswith(f"{name} grows by")


@pytest.mark.parametrize("joins", [False, True])
def test_a_case_is_its_seed_and_number(joins):
    assert draw(1, 5, joins=joins) == draw(1, 5, joins=joins)
    cases = [draw(1, number, joins=joins) for number in range(50)]
    assert len(set(map(str, cases))) == 50
    assert {case.fault for case in cases} == ({"kill", "quit"} if joins else {*FAULTS})
    assert not any(ELDER in case.leavers for case in cases)


def test_what_a_process_holds_can_be_read():
    held = held_at_rest()
    assert held.keys() == {*MEMORY, *COUNTS}
    assert held["threads"] >= 1
    assert 1000 < held["heap_kib"] < held["rss_kib"]
