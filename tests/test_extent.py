"""The part of a product that `make test` takes: no value and no pair of values is left out."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import extent

AXES = [range(7), "abc", (True, False), "xy"]


@pytest.mark.parametrize("axes", [AXES, AXES[:2], [range(3)] * 4, [range(5), range(1)]])
def test_pairs_meet(axes, monkeypatch):
    monkeypatch.setattr(extent, "FULL", False)
    chosen = extent.pairs(*axes)
    assert len(chosen) == len({*chosen}) <= len([*product(*axes)])
    for i, j in combinations(range(len(axes)), 2):
        assert {(c[i], c[j]) for c in chosen} == {*product(axes[i], axes[j])}


def test_pairs_are_fewer_than_the_product(monkeypatch):
    monkeypatch.setattr(extent, "FULL", False)
    assert len(extent.pairs(*AXES)) <= 7 * 3 + 4


def test_parts_make_the_whole(monkeypatch):
    monkeypatch.setattr(extent, "FULL", False)
    values = [*range(11)]
    assert sorted(value for i in range(3) for value in extent.part(values, 3, i)) == values
    assert extent.part(values, 3, 4) == extent.part(values, 3, 1)


def test_the_full_extent_is_everything(monkeypatch):
    monkeypatch.setattr(extent, "FULL", True)
    assert extent.pairs(*AXES) == [*product(*AXES)]
    assert extent.part([1, 2, 3], 3, 1) == [1, 2, 3]
