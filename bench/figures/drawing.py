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

GREY = "#6e6e6e"
MARKERS = "os^Dv<>pX*"  # as many as the style has colours
DIGEST = "Chart"  # the text in a PNG that says which chart it shows
STYLE: list[Any] = [
    "petroff10",  # colours that are distinct for colour-blind readers, too
    {
        "font.size": 11,
        "lines.linewidth": 2.2,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#e6e6e6",
        "legend.frameon": False,
    },
]
# The baseline of a comparison often lies below another line, and shows at both sides of it.
BASELINE = {"color": GREY, "linewidth": 6.0, "alpha": 0.5, "zorder": 1.9}


def chart(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that draws into a `panel` one that draws in our style, with a legend."""

    @wraps(draw)
    def drawn(*values: Any) -> Any:
        from matplotlib import style

        with style.context(STYLE):
            figure = draw(*values)
            figure.legend(loc="outside right center")
            return figure

    return drawn


def panel(title: str, subtitle: str) -> tuple[Any, Any]:
    """Return a figure under a title, and its pair of axes."""
    from cycler import cycler
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure((9.6, 5.4), 120)
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.86), wspace=0.05)
    figure.set_layout_engine(layout)
    figure.text(0.012, 0.975, title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.012, 0.915, subtitle, fontsize=10, color=GREY, va="top")
    axes = figure.subplots()
    axes.set_prop_cycle(rcParams["axes.prop_cycle"] + cycler(marker=list(MARKERS)))
    return figure, axes


def line(
    axes: Any, label: str, points: Iterable[tuple[float, float]], *, base: bool = False
) -> None:
    """Draw a line of points (x, y), from left to right; `base`: it is the baseline."""
    x, y = zip(*sorted(points), strict=True)
    axes.plot(x, y, label=label, marker="", **(BASELINE if base else {}))


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
    from matplotlib import style

    path.parent.mkdir(parents=True, exist_ok=True)
    with style.context(STYLE):
        figure.savefig(path, format="png", metadata={DIGEST: digest(figure), "Software": None})


def picture_digest(path: Path) -> str:
    """Return the digest of the chart in a PNG of `save`; empty for other pictures."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as image:
        return str(image.info.get(DIGEST, ""))
