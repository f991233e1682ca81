"""The style of all charts, which matplotlib draws as PNG.

`pip install 'pycomm[bench]'` installs matplotlib; only drawing needs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which are distinct for colour-blind readers, too, without their yellow,
# which is too pale for a line. More lines than colours also differ in dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c6d31")
GREY, INK, FAINT, GRID = "#6e6e6e", "#222222", "#555555", "#e6e6e6"
MARKERS = "os^Dv<>p"
DIGEST = "Chart"  # the text in a PNG that says which chart it shows
MARKED = 16  # points of a line that has markers, at most
STYLE = {
    "font.size": 11,
    "lines.linewidth": 2.2,
    "lines.markersize": 5,
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
# The baseline of a comparison often lies below another line, and shows at both sides of it.
BASELINE = {"color": GREY, "marker": "o", "linestyle": "-"}
BASELINE |= {"linewidth": 6.0, "alpha": 0.5, "zorder": 1.9}


def chart(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that draws into a `panel` one that draws in our style, with a legend."""

    @wraps(draw)
    def drawn(*values: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            figure = draw(*values)
            named: dict[str, Any] = {}
            for axes in figure.axes:
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                    named.setdefault(label, handle)
            figure.legend(named.values(), named.keys(), loc="outside right center")
            return figure

    return drawn


def panel(title: str, subtitle: str) -> tuple[Any, Any]:
    """Return a figure under a title, and its pair of axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure((9.6, 5.4), 120)
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.86), wspace=0.05)
    figure.set_layout_engine(layout)
    figure.text(0.012, 0.975, title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.012, 0.915, subtitle, fontsize=10, color=FAINT, va="top")
    axes = figure.subplots()
    dashes = ["-"] * len(COLOURS) + ["--"] * len(COLOURS)
    axes.set_prop_cycle(color=COLOURS * 2, marker=list(MARKERS) * 2, linestyle=dashes)
    return figure, axes


def line(
    axes: Any, label: str, points: Iterable[tuple[float, float]], *, base: bool = False
) -> None:
    """Draw a line of points (x, y), from left to right; `base`: it is the baseline."""
    x, y = zip(*sorted(points), strict=True)
    look = dict(BASELINE) if base else {}
    if len(x) > MARKED:
        look["marker"] = ""
    axes.plot(x, y, label=label, **look)


def digest(figure: Any) -> str:
    """Return a hash of what a chart shows: equal for equal charts, on every machine."""
    shown: list[Any] = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        shown.append([axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()])
        for axis in (axes.xaxis, axes.yaxis):
            places = getattr(axis.get_major_locator(), "locs", ())  # those that we have chosen
            labels = [axis.get_major_formatter()(place) for place in places]
            shown.append([axis.get_scale(), *map(float, places), *labels])
        shown += [[one.get_label(), one.get_xydata().tolist()] for one in axes.lines]
        for bars in axes.containers:
            shown.append([bars.get_label(), [bar.get_bbox().bounds for bar in bars]])
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def save(figure: Any, path: Path) -> None:
    """Write a chart as PNG. Equal charts make equal files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        told = {DIGEST: digest(figure), "Software": None}
        figure.savefig(path, format="png", metadata=told)


def picture_digest(path: Path) -> str:
    """Return the digest of the chart in a PNG of `save`; empty for other pictures."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as image:
        return str(image.info.get(DIGEST, ""))
