"""Pictures of a sweep: a page by plotly, a PNG by matplotlib. Both are optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycomm.plan.show import describe
from pycomm.plan.sweep import Curves, Sweep
from pycomm.plan.units import format_rate, format_time

# Colours of Okabe and Ito, which also people who do not see all colours can tell apart.
COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
DASHES = ("solid", "dash")
INK, PAPER, GRID = "#222222", "#ffffff", "#e6e6e6"


def _style(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def _order(curves: Curves) -> list[str]:
    """Codecs with no codec first, then as they stand at the slowest or smallest place."""
    return sorted(curves.steps, key=lambda codec: (codec != "none", curves.steps[codec][0]))


def _axes(found: Sweep) -> tuple[tuple[Curves, list[float], str, str], ...]:
    ranks, rate = found.cluster.ranks, format_rate(found.cluster.slowest.rate)
    by_rate, by_ranks = found.by_rate, found.by_ranks
    return (
        (by_rate, [8 * r for r in by_rate.at], "bit/s between nodes", f"{ranks} ranks"),
        (by_ranks, list(by_ranks.at), "ranks", f"{rate} between nodes"),
    )


def _spell(curves: Curves, place: float) -> str:
    return format_rate(place) if curves.axis == "rate" else f"{place:.0f} ranks"


def save_html(found: Sweep, path: Path) -> None:
    """A page with both pictures and plotly itself in it: it needs no network.

    Raises:
        ImportError: plotly is not there.
    """
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    axes = _axes(found)
    figure: Any = make_subplots(rows=1, cols=2, subplot_titles=[title for *_, title in axes])
    order = _order(found.by_rate)
    for column, (curves, places, label, _) in enumerate(axes, start=1):
        words = [_spell(curves, place) for place in curves.at]
        for index, codec in enumerate(order):
            colour, dash = _style(index)
            name = "no codec" if codec == "none" else codec
            text = [
                f"{name}, {word}: {format_time(step)}"
                for word, step in zip(words, curves.steps[codec], strict=True)
            ]
            line = graph_objects.Scatter(
                x=places,
                y=[1e3 * step for step in curves.steps[codec]],
                name=name,
                legendgroup=codec,
                showlegend=column == 1,
                mode="lines",
                line={"color": colour, "dash": dash, "width": 3 if codec == "none" else 2},
                text=text,
                hovertemplate="%{text}<extra></extra>",
            )
            figure.add_trace(line, row=1, col=column)
        grid = {"gridcolor": GRID, "row": 1, "col": column}
        figure.update_xaxes(type="log", title=label, **grid)
        figure.update_yaxes(type="log", title="ms a step" if column == 1 else None, **grid)
    marks = [rate for rate in found.crossovers.values() if rate is not None]
    for rate in {round(rate, -3) for rate in marks if rate < found.by_rate.at[-1]}:
        figure.add_vline(x=8 * rate, line={"color": GRID, "dash": "dot"}, row=1, col=1)
    figure.update_layout(
        title=describe(found.model, found.cluster),
        plot_bgcolor=PAPER,
        paper_bgcolor=PAPER,
        font={"color": INK},
        legend={"title": "click to hide"},
    )
    figure.write_html(path, include_plotlyjs="inline", full_html=True)


def save_png(found: Sweep, path: Path) -> None:
    """Both pictures beside each other.

    Raises:
        ImportError: matplotlib is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, drawn = pyplot.subplots(1, 2, figsize=(13, 5.6), dpi=120, facecolor=PAPER)
    order = _order(found.by_rate)
    for axes, (curves, places, label, title) in zip(drawn, _axes(found), strict=True):
        for index, codec in enumerate(order):
            colour, dash = _style(index)
            axes.plot(
                places,
                [1e3 * step for step in curves.steps[codec]],
                color=colour,
                linestyle="--" if dash == "dash" else "-",
                linewidth=2.6 if codec == "none" else 1.6,
                label="no codec" if codec == "none" else codec,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=10)
        axes.grid(color=GRID)
    drawn[0].set_ylabel("ms a step")
    drawn[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    canvas.suptitle(describe(found.model, found.cluster), fontsize=11, color=INK)
    canvas.tight_layout()
    canvas.savefig(path)
    pyplot.close(canvas)
