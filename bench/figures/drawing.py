"""Charts in one style, drawn by matplotlib as PNG.

`pip install 'pycomm[bench]'` installs matplotlib; only drawing needs it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

# Okabe and Ito's colours, which are distinct for colour-blind readers, too, without their yellow,
# which is too pale for a line. More series than colours also differ in dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c6d31")
BASE, INK, FAINT, GRID = "#6e6e6e", "#222222", "#555555", "#e6e6e6"
MARKERS = "os^Dv<>pPX*h"
DIGEST = "Chart"  # the text in a PNG that says which chart it shows
ROW, GAP = 26.0, 8.0
"""Points: from one row of names to the next, and between names."""
STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "legend.labelspacing": 0.7,
}


@dataclass(frozen=True)
class Series:
    """One line or set of points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Literal["line", "points", "bars", "spans"] = "line"
    """"bars": horizontal ones, of lengths x at the places y, beside those of the other series;
    "spans": each from a point to the next one, for every second point."""
    base: bool = False
    """True for the baseline of the comparison: grey, wide and behind the others."""


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()
    """Positions and labels of ticks; empty: matplotlib's choice."""
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
    """Place of the names; "ends": at the lines' ends, for a few lines in one panel."""

    def digest(self) -> str:
        """Return a hash of the contents: equal for equal charts, on every machine."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def looks(self) -> dict[str, dict[str, Any]]:
        """Return colour, dashes and marker of each label: the same in all panels."""
        series = [line for panel in self.panels for line in panel.series]
        order = dict.fromkeys(line.label for line in series if not line.base)
        found = {
            label: {
                "color": COLOURS[i % len(COLOURS)],
                "linestyle": "--" if i // len(COLOURS) % 2 else "-",
                "marker": MARKERS[i % len(MARKERS)],
            }
            for i, label in enumerate(order)
        }
        plain = {"color": BASE, "linestyle": "-", "marker": MARKERS[0]}
        return found | {line.label: plain for line in series if line.base}


def ticks(low: float, high: float, spell: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return a log axis's ticks: powers of ten, and on a short axis 2 and 5 times these."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 100 else (1,)
    places = [step * 10.0**power for power in powers for step in steps]
    return [(place, spell(place)) for place in places if 0.8 * low <= place <= 1.25 * high]


def save(chart: Chart, path: Path) -> None:
    """Draw a chart as PNG. Equal charts make equal files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        told = {DIGEST: chart.digest(), "Software": None}
        figure_of(chart).savefig(path, format="png", metadata=told)


def figure_of(chart: Chart) -> Any:
    """Return the chart as a figure of matplotlib, in its present style."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure((9.6 if len(chart.panels) == 1 else 12.6, 5.4), 120)
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.86), wspace=0.05)
    figure.set_layout_engine(layout)
    drawn = figure.subplots(1, len(chart.panels), squeeze=False)[0]
    for axes, panel in zip(drawn, chart.panels, strict=True):
        _draw(axes, chart, panel)
    figure.text(0.012, 0.975, chart.title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.012, 0.915, chart.subtitle, fontsize=10, color=FAINT, va="top")
    if chart.labels == "ends":
        _name_ends(drawn[0], chart)
        return figure
    named: dict[str, Any] = {}
    for axes in drawn:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(named.values(), named.keys(), loc="outside right center")
    return figure


def picture_digest(path: Path) -> str:
    """Return the digest of the chart in a PNG of `save`; empty for other pictures."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as image:
        return str(image.info.get(DIGEST, ""))


def _draw(axes: Any, chart: Chart, panel: Panel) -> None:
    for guide in panel.guides:
        axes.plot(guide.x, guide.y, ":", color=FAINT, linewidth=1.3, label=guide.label)
    for place, line in enumerate(panel.series):
        look = chart.looks()[line.label]
        if line.kind == "bars":
            high = 0.8 / len(panel.series)
            middles = [y + high * ((len(panel.series) - 1) / 2 - place) for y in line.y]
            axes.barh(middles, line.x, high, label=line.label, color=look["color"])
            continue
        if line.kind == "spans":
            lengths = [end - begin for begin, end in zip(line.x[::2], line.x[1::2], strict=True)]
            axes.barh(line.y[::2], lengths, 0.7, line.x[::2], label=line.label, color=look["color"])
            continue
        if line.kind == "points":
            look |= {"linestyle": "none", "markersize": 7, "alpha": 0.85}
        elif line.base:  # often lies below another line, and shows at both sides of it
            look |= {"linewidth": 6.0, "alpha": 0.5, "zorder": 1.9}
        else:
            look |= {"linewidth": 2.2, "markersize": 5}
        if line.kind == "line" and len(line.x) > 16:
            look["marker"] = None
        axes.plot(line.x, line.y, label=line.label, **look)
    axes.set_title(panel.title)
    for name, axis in (("x", panel.x), ("y", panel.y)):
        axes.set(**{f"{name}label": axis.label})
        if axis.log:
            axes.set(**{f"{name}scale": "log"})
        if axis.ticks:
            places, labels = zip(*axis.ticks, strict=True)
            axes.set(**{f"{name}ticks": places, f"{name}ticklabels": labels})
            getattr(axes, f"{name}axis").minorticks_off()
        if axis.limits is not None:
            axes.set(**{f"{name}lim": axis.limits})


def _name_ends(axes: Any, chart: Chart) -> None:
    """Write names and final values below all lines, in as many rows as keep them apart."""
    from matplotlib.text import Text

    figure = axes.figure
    series = sorted(chart.panels[0].series, key=lambda line: line.x[-1])
    names = []
    for line in series:
        colour = chart.looks()[line.label]["color"]
        axes.plot(line.x[-1], line.y[-1], "o", color=colour, markersize=7)
        names.append(
            axes.annotate(
                f"{line.label}: {line.x[-1]:.0f} s",
                (line.x[-1], line.y[-1]),
                xytext=(0.0, 0.0),
                textcoords="axes points",
                color=colour,
                fontweight="bold",
                fontsize=10,
                ha="center",
                va="bottom",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 4},
            )
        )
    figure.draw_without_rendering()  # the layout, and with it all sizes, in pixels
    point = figure.dpi / 72
    area = axes.get_window_extent()
    width, high = area.width / point, area.height / point
    rows = [0.0]  # the right end of each row's last name, in points
    places = []
    for line, name in zip(series, names, strict=True):
        # Of the text alone: an annotation's own extent includes the connecting line.
        half = Text.get_window_extent(name).width / point / 2 + GAP / 2
        end = (axes.transData.transform((line.x[-1], 0))[0] - area.x0) / point
        place = max(half, min(end, width - half))
        row = next((i for i, taken in enumerate(rows) if taken <= place - half), len(rows))
        rows[row:] = [place + half, *rows[row + 1 :]]
        places.append((place, row))
    for name, (place, row) in zip(names, places, strict=True):
        name.set_position((place, GAP + ROW * (len(rows) - 1 - row)))
        name.set_zorder(100 - row)  # a name hides the connecting lines of those below it
    low, top = axes.get_ylim()
    lowest = min(min(line.y) for line in series)
    room = (2 * GAP + ROW * len(rows)) / high
    axes.set_ylim(min(low, (lowest - room * top) / (1 - room)), top)
