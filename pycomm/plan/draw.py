"""Charts of a sweep: step times against the rate of links and the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pycomm.charts import Axis, Chart, Panel, Section, Series, save_page
from pycomm.charts import save_png as save_chart
from pycomm.plan.show import describe
from pycomm.plan.sweep import FASTEST, Curves, Sweep
from pycomm.plan.units import format_rate, format_time

TITLE = "Predicted steps"
ADVISED = "advised"
SAME = 1.01  # curves whose ratio never exceeds this share a line


def chart(
    by_rate: Curves,
    by_ranks: Curves,
    crossovers: Mapping[str, float | None],
    subtitle: str,
    titles: tuple[str, str],
) -> Chart:
    """Return a chart with both axes of a sweep side by side.

    Args:
        by_rate, by_ranks: curves of the sweep.
        crossovers: bytes per second below which each codec pays off.
        subtitle: description of what is predicted.
        titles: what is held constant along each axis.
    """
    lines = _shared_lines(by_rate, by_ranks)
    left = _panel(by_rate, lines, titles[0], "rate between nodes", format_rate, 8)
    right = _panel(by_ranks, lines, titles[1], "ranks", "{:.0f} ranks".format, 1)
    low, high = left.y.limits or (0.0, 1.0)
    inside = {rate for rate in crossovers.values() if rate is not None and rate < FASTEST}
    guides = [
        Series("last rate to pay", (8 * rate, 8 * rate), (low, high)) for rate in sorted(inside)
    ]
    left = Panel(left.x, left.y, left.series, left.title, _apart(guides))
    return Chart(TITLE, subtitle, (left, right))


def of_sweep(found: Sweep) -> Chart:
    rate = format_rate(found.cluster.slowest.rate)
    titles = (f"{found.cluster.ranks} ranks", f"{rate} between nodes")
    subtitle = describe(found.model, found.cluster)
    return chart(found.by_rate, found.by_ranks, found.crossovers, subtitle, titles)


def save_html(found: Sweep, path: Path) -> None:
    """Save a page with both charts and plotly itself, which needs no network.

    Raises:
        ImportError: plotly is not installed.
    """
    pays = [("codec", "shortens the step")]
    pays += [(codec, _pays(rate)) for codec, rate in found.crossovers.items()]
    intro = "Grey bands follow what is advised. Point at a line for its figures."
    section = Section(of_sweep(found), [f"Advised: {found.advised()}."], table=pays)
    save_page("pycomm: a plan's sweep", intro, [section], path)


def save_png(found: Sweep, path: Path) -> None:
    """Save both charts side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    save_chart(of_sweep(found), path)


def _pays(below: float | None) -> str:
    if below is None:
        return "nowhere from 10 Mbit/s to 400 Gbit/s"
    return f"below {format_rate(below)}" if below < FASTEST else "at every rate up to 400 Gbit/s"


def _shared_lines(by_rate: Curves, by_ranks: Curves) -> dict[str, str]:
    """Return the names of lines by the codec that each stands for, no codec first."""

    def course(codec: str) -> list[float]:
        return [*by_rate.steps[codec], *by_ranks.steps[codec]]

    groups: list[list[str]] = []
    order = sorted(by_rate.steps, key=lambda codec: (codec != "none", -by_rate.steps[codec][0]))
    for codec in order:
        for group in groups:
            pairs = zip(course(group[0]), course(codec), strict=True)
            if all(max(a, b) <= SAME * min(a, b) for a, b in pairs):
                group.append(codec)
                break
        else:
            groups.append([codec])
    return {
        group[0]: ", ".join("no codec" if codec == "none" else codec for codec in group)
        for group in groups
    }


def _panel(
    curves: Curves,
    lines: Mapping[str, str],
    title: str,
    label: str,
    spell: Callable[[float], str],
    factor: float,
) -> Panel:
    places = [factor * place for place in curves.at]
    words = [spell(place) for place in curves.at]

    def series(name: str, steps: Sequence[float], base: bool = False) -> Series:
        hover = [
            f"{name}, {word}: {format_time(step)}" for word, step in zip(words, steps, strict=True)
        ]
        return Series(name, places, list(steps), hover, base=base)

    advised = [curves.steps[codec][i] for i, codec in enumerate(curves.best)]
    found = [series(ADVISED, advised, base=True)]
    found += [series(name, curves.steps[codec]) for codec, name in lines.items()]
    low = min(min(line.y) for line in found)
    high = max(max(line.y) for line in found)
    y = Axis("step", True, ticks(low, high, format_time), (low / 1.15, high * 1.15))
    x_ticks = ticks(places[0], places[-1], lambda place: spell(place / factor).split(" ranks")[0])
    return Panel(Axis(label, True, x_ticks), y, found, title)


def _apart(guides: Sequence[Series]) -> list[Series]:
    """Return the lines that a picture can separate: 5 % or more from the one before."""
    kept: list[Series] = []
    for guide in guides:
        if not kept or guide.x[0] > 1.05 * kept[-1].x[0]:
            kept.append(guide)
    return kept


def ticks(low: float, high: float, spell: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return a log axis's ticks: powers of ten, and on a short axis 2 and 5 times these."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 100 else (1,)
    places = [step * 10.0**power for power in powers for step in steps]
    return [(place, spell(place)) for place in places if 0.8 * low <= place <= 1.25 * high]
