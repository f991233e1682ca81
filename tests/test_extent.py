"""The part of a product that `make test` takes: values, and pairs where these count."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from tests import extent

AXES = [range(7), "abc", (True, False), "xy"]


@pytest.mark.parametrize(
    ("axes", "most"),
    [(AXES, 25), (AXES[:2], 21), ([range(3)] * 4, 81), ([range(5), range(1)], 5)],
)
def test_pairs_meet(axes, most, monkeypatch):
    monkeypatch.setattr(extent, "FULL", False)
    chosen = extent.pairs(*axes)
    assert len(chosen) == len({*chosen}) <= most
    for i, j in combinations(range(len(axes)), 2):
        assert {(c[i], c[j]) for c in chosen} == {*product(axes[i], axes[j])}
    monkeypatch.setattr(extent, "FULL", True)
    assert extent.pairs(*axes) == [*product(*axes)]


def test_parts_make_the_whole(monkeypatch):
    monkeypatch.setattr(extent, "FULL", False)
    values = [*range(11)]
    assert sorted(value for i in range(3) for value in extent.part(values, 3, i)) == values
    assert extent.part(values, 3, 4) == extent.part(values, 3, 1)
    monkeypatch.setattr(extent, "FULL", True)
    assert extent.part(values, 3, 1) == values


def marked(name, mark, cases):
    return [
        SimpleNamespace(
            nodeid=f"{name}[{case}]",
            callspec=SimpleNamespace(params=case),
            get_closest_marker=lambda wanted: mark.mark if mark and wanted == "extent" else None,
        )
        for case in cases
    ]


@pytest.mark.parametrize("full", [False, True])
def test_marked_tests_alone_have_fewer_cases(full, monkeypatch):
    monkeypatch.setattr(extent, "FULL", full)
    cases = [{"a": a, "b": b} for a in range(4) for b in (len, sum)]
    unlike = marked("one", extent.each_value, cases), marked("all", None, cases)
    items = [item for pair in zip(*unlike, strict=True) for item in pair]
    run, left_out = extent.without_the_rest(items)
    assert [item for item in items if item in run] == run
    assert len(run) + len(left_out) == len(items)
    assert [item for item in run if item in unlike[1]] == unlike[1]
    assert len(left_out) == (0 if full else 4)
    for name in "ab":
        kept = {one.callspec.params[name] for one in unlike[0] if one in run}
        assert kept == {case[name] for case in cases}
