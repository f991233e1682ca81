"""Extent of the tests: how much of the large products of parameters runs.

`make test` takes a part in which every value of every parameter occurs; `make soak` takes all. A
test of its own costs 2 ms in a worker, and a part of that in the collection of each worker, so
cases that take less run in a loop, each within `noting`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

each_value = pytest.mark.extent(1)
"""Mark of a test: of its cases run as many as hold each value of each parameter."""
each_pair = pytest.mark.extent(2)
"""The same for each two values of two parameters."""

FULL = os.environ.get("PYCOMM_TEST_EXTENT") == "full"

T = TypeVar("T")


def part(values: Sequence[T], of: int, offset: int = 0) -> list[T]:
    """Return every `of`-th value, from `offset` on; all of them if the extent is full."""
    return list(values) if FULL else list(values[offset % of :: of])


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples in which each value of an axis meets each value of every other axis.

    They are a part of the product; the product itself if the extent is full.
    """
    tuples = list(product(*axes))
    if FULL:
        return tuples
    # By their places, since an axis may hold a value twice.
    places = [dict(enumerate(each)) for each in product(*(range(len(axis)) for axis in axes))]
    return [tuples[i] for i in covering(places, width=2)]


def without_the_rest(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide tests by their marks into those that run and the others, each in their order."""
    tests: dict[tuple[str, int], list[Any]] = {}
    for item in items:
        if not FULL and (mark := item.get_closest_marker("extent")):
            (width,) = mark.args
            tests.setdefault((item.nodeid.partition("[")[0], width), []).append(item)
    left_out: set[int] = set()
    for (_, width), cases in tests.items():
        kept = covering([case.callspec.params for case in cases], width)
        left_out |= {id(case) for case in cases} - {id(cases[i]) for i in kept}
    run = [item for item in items if id(item) not in left_out]
    return run, [item for item in items if id(item) in left_out]


def covering(cases: Sequence[Mapping[Any, Any]], width: int) -> list[int]:
    """Return places of cases that hold all combinations of `width` values that any case holds.

    The greedy covering of Cohen et al., "The AETG System", IEEE TSE 23(7), 1997, with all cases as
    candidates.

    Args:
        cases: values by the names of their parameters. Values with equal representations count as
            equal: those of other types need not be comparable.
    """

    def held(case: Mapping[Any, Any]) -> Iterable[tuple[tuple[Any, str], ...]]:
        values = sorted((name, repr(value)) for name, value in case.items())
        return combinations(values, min(width, len(values)))

    all_held = [set(held(case)) for case in cases]
    chosen, left = [], set().union(*all_held)
    while left:
        best = max(range(len(cases)), key=lambda i: len(all_held[i] & left))
        chosen.append(best)
        left -= all_held[best]
    return sorted(chosen)


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Add a note to every error that leaves the block: which case, or which rank, it is of."""
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(what)
        raise
