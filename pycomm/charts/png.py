"""Charts as PNG files, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.charts.chart import FAINT, GRID, INK, PAPER, Axis, Chart, Panel, Series, looks

DIGEST = "Chart"  # the text in the file that says which chart it shows
INCHES = {1: (9.6, 5.4), 2: (12.6, 5.4)}  # by the number of panels
DPI = 120
MARKERS = "os^Dv<>pPX*h"
# Width and opacity. The baseline often lies below another line, and shows at both sides of it.
BASE, LINE = (6.0, 0.5), (2.2, 1.0)


def save_png(chart: Chart, path: Path) -> None:
    """Draw a chart.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = {"font.size": 11, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT}
    plain |= {"xtick.labelsize": 9.5, "ytick.labelsize": 9.5}
    with matplotlib.rc_context(plain):
        count = len(chart.panels)
        canvas, drawn = pyplot.subplots(
            1, count, figsize=INCHES[count], dpi=DPI, facecolor=PAPER, squeeze=False
        )
        for axes, panel in zip(drawn[0], chart.panels, strict=True):
            _draw(axes, chart, panel)
        canvas.text(0.012, 0.975, chart.title, fontsize=14, fontweight="bold", va="top")
        canvas.text(0.012, 0.915, chart.subtitle, fontsize=10, color=FAINT, va="top")
        if chart.labels == "legend":
            _legend(canvas, drawn[0])
            canvas.tight_layout(rect=(0, 0, 0.995 - _legend_width(chart), 0.88))
        else:
            _name_ends(drawn[0][0], chart)
            canvas.tight_layout(rect=(0, 0, 1, 0.88))
        canvas.savefig(path, metadata={DIGEST: chart.digest(), "Software": None})
        pyplot.close(canvas)


def picture_digest(path: Path) -> str:
    """Return the digest of the chart in a picture of `save_png`; empty for other pictures."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as image:
        return str(image.info.get(DIGEST, ""))


def _draw(axes: Any, chart: Chart, panel: Panel) -> None:
    for guide in panel.guides:
        axes.plot(guide.x, guide.y, ":", color=FAINT, linewidth=1.3, label=guide.label)
    for series in panel.series:
        look = looks(chart)[series.label]
        width, alpha = BASE if series.base else LINE
        marker = MARKERS[look.marker % len(MARKERS)]
        points = series.kind == "points"
        axes.plot(
            series.x,
            series.y,
            linestyle="none" if points else "--" if look.dashed else "-",
            linewidth=width,
            marker=marker if points or len(series.x) <= 16 else None,
            markersize=7 if points else 5,
            alpha=0.85 if points else alpha,
            color=look.colour,
            label=series.label,
            zorder=2 if series.base else 3,
        )
    _scale(axes.set_xscale, axes.set_xlim, axes.xaxis, panel.x)
    _scale(axes.set_yscale, axes.set_ylim, axes.yaxis, panel.y)
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _scale(set_scale: Any, set_limits: Any, drawn: Any, axis: Axis) -> None:
    from matplotlib import ticker

    drawn.set_label_text(axis.label)
    if axis.log:
        set_scale("log")
        drawn.set_minor_formatter(ticker.NullFormatter())
        if not axis.ticks:
            drawn.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    if axis.ticks:
        drawn.set_ticks([place for place, _ in axis.ticks], [text for _, text in axis.ticks])
        drawn.set_minor_locator(ticker.NullLocator())
    if axis.limits is not None:
        set_limits(*axis.limits)


def _legend_width(chart: Chart) -> float:
    """Return the share of the picture's width that names take."""
    names = [s.label for panel in chart.panels for s in (*panel.series, *panel.guides)]
    width, _ = INCHES[len(chart.panels)]
    return (0.6 + 0.088 * max(map(len, names))) / width


def _legend(canvas: Any, drawn: Any) -> None:
    """Draw the legend to the right of all panels, each name once."""
    found: dict[str, Any] = {}
    for axes in drawn:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    canvas.legend(
        found.values(),
        found.keys(),
        loc="center right",
        bbox_to_anchor=(1.0, 0.48),
        frameon=False,
        fontsize=10,
        labelspacing=0.7,
    )


def _name_ends(axes: Any, chart: Chart) -> None:
    """Write names and final values at the lines' ends, in place of a legend."""
    series = chart.panels[0].series
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.1 * (high - low), high)
    for line, offset in zip(series, _offsets(series), strict=True):
        colour = looks(chart)[line.label].colour
        end = (line.x[-1], line.y[-1])
        axes.plot(*end, "o", color=colour, markersize=7)
        axes.annotate(
            f"{line.label}: {line.x[-1]:.0f} s",
            end,
            xytext=(0.0, offset),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            fontsize=10,
            ha="center",
            zorder=100 + offset,  # a name hides the connecting lines of those below it
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 4},
        )


def _offsets(series: Sequence[Series]) -> list[float]:
    """Return the names' offsets from the ends in points: below, in two rows if ends are close."""
    longest = max(line.x[-1] for line in series)
    order = sorted(range(len(series)), key=lambda i: series[i].x[-1])
    places, lower, last = [0.0] * len(series), True, -1.0
    for i in order:
        end = series[i].x[-1] / longest
        lower = end - last < 0.3 and not lower
        places[i], last = (-62.0 if lower else -36.0), end
    return places
