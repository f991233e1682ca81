"""Unequal arguments of a call: cases drawn at random, some for each transport."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.collectives.ways import WAYS
from tests.faults.injection import unequal


@pytest.mark.parametrize("way", WAYS)
def test_unequal_arguments_are_errors_on_every_rank(way):
    for number in range(30):
        case = unequal.draw(11, number, way)
        assert unequal.play(case) == [], str(case)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_calls_on_every_rank_are_right(way):
    for number in range(20):
        case = unequal.draw(12, number, way)
        assert unequal.play(replace(case, theirs=case.ours)) == [], str(case)


def test_cases_differ_in_everything_that_a_call_has():
    drawn = [unequal.draw(11, number) for number in range(2000)]
    assert {case.ours[0].op for case in drawn} == set(unequal.OPS)
    every = {what for op in unequal.OPS for what in unequal.ways_to_differ(op)}
    assert {case.what for case in drawn} == every
    assert all(case.ours != case.theirs for case in drawn)
