"""Description of a chart, independent of the library that draws it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

# Okabe and Ito's colours, which are distinct for colour-blind readers, too, without their yellow,
# which is too pale for a line. More series than colours also differ in dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c6d31")
BASE = "#6e6e6e"
INK, FAINT, PAPER, GRID = "#222222", "#555555", "#ffffff", "#e6e6e6"


@dataclass(frozen=True)
class Series:
    """One line or set of points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    hover: Sequence[str] = ()
    """Hover text of each point on a page; empty: label and values."""
    kind: Literal["line", "points"] = "line"
    base: bool = False
    """True for the baseline of the comparison: grey, wide and behind the others."""


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()
    """Positions and labels of ticks; empty: the library's choice."""
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    title: str = ""
    guides: Sequence[Series] = ()
    """Thin grey reference lines; their labels appear in the legend once."""


@dataclass(frozen=True)
class Chart:
    """One panel, or two side by side, under one title."""

    title: str
    subtitle: str
    panels: Sequence[Panel]
    labels: Literal["legend", "ends"] = "legend"
    """Place of the names in a picture; "ends": at the lines' ends, for a few lines in one panel."""

    def digest(self) -> str:
        """Return a hash of the contents: equal for equal charts, on every machine."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Style:
    """Appearance of one series, the same in all panels and in both libraries."""

    colour: str
    dashed: bool
    marker: int
    """Index of a marker shape."""


def looks(chart: Chart) -> dict[str, Style]:
    """Return the appearance of each label, by the order in which labels appear."""
    order = dict.fromkeys(series.label for series in _all(chart) if not series.base)
    found = {
        label: Style(COLOURS[i % len(COLOURS)], i // len(COLOURS) % 2 == 1, i)
        for i, label in enumerate(order)
    }
    return found | {s.label: Style(BASE, False, 0) for s in _all(chart) if s.base}


def _all(chart: Chart) -> Iterator[Series]:
    return (series for panel in chart.panels for series in panel.series)
