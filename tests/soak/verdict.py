"""Verdict of the soak: resources that a process holds between cycles must not grow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations

from tests.soak.director import Sample
from tests.soak.held import COUNTS, MEMORY

SETTLED = 0.25
"""The share of the cycles in which everything that is made once has been made."""
GROWTH = 512.0
"""KiB per 100 events by which memory may grow: a fifth of what one group that is not given back
would hold, of which there is at least one per event."""
ENOUGH = 12
"""Cycles from which on a slope says something."""


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Theil's: the median of the slopes between all pairs of points, which bears outliers."""
    steps = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in combinations(zip(x, y, strict=True), 2)
        if x2 > x1
    ]
    return statistics.median(steps) if steps else 0.0


def growths(samples: Sequence[Sample]) -> dict[str, float]:
    """KiB per 100 events by which a process's memory grows, at rest, when it has settled."""
    late = samples[int(SETTLED * len(samples)) :]
    events = [float(sample.events) for sample in late]
    return {
        name: 100 * slope(events, [float(sample.held[name]) for sample in late]) for name in MEMORY
    }


def breaches(samples: Sequence[Sample]) -> list[str]:
    """Everything that is not flat in the samples of one process at rest, oldest first."""
    wrong: list[str] = []
    if not samples:
        return wrong
    early = samples[: max(1, int(SETTLED * len(samples)))]
    for name in COUNTS:
        most = max(sample.held[name] for sample in early)
        last = samples[-1].held[name]
        # What is left behind stays, so the last sample shows it.
        if last > most:
            wrong.append(f"{last} {name}, at most {most} in the first cycles")
    if len(samples) >= ENOUGH:
        for name, growth in growths(samples).items():
            if growth > GROWTH:
                wrong.append(
                    f"{name} grows by {growth:.0f} in 100 events, allowed are {GROWTH:.0f}"
                )
    return wrong
