"""Charts of a sweep: step times against the rate of links and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pycomm.charts import Axis, Chart, Panel, Section, Series, save, save_page, ticks
from pycomm.plan.show import describe
from pycomm.plan.sweep import FASTEST, Curves, Sweep
from pycomm.plan.units import format_rate, format_time

ADVISED = "advised"
SAME = 1.01  # curves whose ratio never exceeds this share a line


def of_sweep(found: Sweep) -> Chart:
    """Return a chart with both axes of a sweep side by side."""
    lines = _shared_lines(found.by_rate, found.by_ranks)
    ranks, rate = found.cluster.ranks, format_rate(found.cluster.slowest.rate)
    left = _panel(
        found.by_rate, lines, f"{ranks} ranks", ("rate between nodes", format_rate, 8),
        sorted({rate for rate in found.crossovers.values() if rate is not None and rate < FASTEST}),
    )  # fmt: skip
    axis = ("ranks", "{:.0f}".format, 1)
    right = _panel(found.by_ranks, lines, f"{rate} between nodes", axis)
    return Chart("Predicted steps", describe(found.model, found.cluster), (left, right))


def save_html(found: Sweep, path: Path) -> None:
    """Save a page with both charts, which needs no network.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pays = [("codec", "shortens the step")]
    pays += [(codec, _pays(rate)) for codec, rate in found.crossovers.items()]
    section = Section(of_sweep(found), [f"Advised: {found.advised()}."], table=pays)
    save_page("pycomm: a plan's sweep", "Grey bands follow what is advised.", [section], path)


def save_png(found: Sweep, path: Path) -> None:
    """Save both charts side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    save(of_sweep(found), path)


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
    axis: tuple[str, Callable[[float], str], int],
    crossovers: list[float] | None = None,
) -> Panel:
    """Return the panel of one axis: its label, how places are spelled, and their unit."""
    label, spell, factor = axis
    places = [factor * place for place in curves.at]
    advised = [curves.steps[codec][i] for i, codec in enumerate(curves.best)]
    found = [Series(ADVISED, places, advised, base=True)]
    found += [Series(name, places, list(curves.steps[codec])) for codec, name in lines.items()]
    every = [step for line in found for step in line.y]
    low, high = min(every) / 1.15, max(every) * 1.15
    guides: list[Series] = []
    for rate in crossovers or ():
        x = factor * rate
        if not guides or x > 1.05 * guides[-1].x[0]:  # closer ones look like one
            guides.append(Series("last rate to pay", (x, x), (low, high)))
    x_ticks = ticks(places[0], places[-1], lambda place: spell(place / factor))
    y = Axis("step", True, ticks(min(every), max(every), format_time), (low, high))
    return Panel(Axis(label, True, x_ticks), y, found, title, guides)
