"""Extent of the tests: how much of the large products of parameters runs.

`make test` takes a part in which every value of every parameter occurs; `make soak` takes all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeVar

FULL = os.environ.get("PYCOMM_TEST_EXTENT") == "full"

T = TypeVar("T")


def part(values: Sequence[T], of: int, offset: int = 0) -> list[T]:
    """Return every `of`-th value, from `offset` on; all of them if the extent is full."""
    return list(values) if FULL else list(values[offset % of :: of])


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples in which each value of an axis meets each value of every other axis.

    The greedy covering of pairs (Cohen et al., "The AETG System", IEEE TSE 23(7), 1997), over the
    whole product as candidates; the product itself if the extent is full.
    """
    candidates = list(product(*(range(len(axis)) for axis in axes)))
    chosen = candidates
    if not FULL:

        def met(places: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
            return {(i, places[i], j, places[j]) for j in range(len(places)) for i in range(j)}

        chosen, open_pairs = [], set().union(*map(met, candidates))
        while open_pairs:
            best = max(candidates, key=lambda places: len(met(places) & open_pairs))
            chosen.append(best)
            open_pairs -= met(best)
    return [
        tuple(axis[place] for axis, place in zip(axes, places, strict=True)) for places in chosen
    ]
