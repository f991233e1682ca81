"""Every figure of pycomm: loss against wall time, as PNG and as a page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Colours of Okabe and Ito, which also people who do not see all colours can tell apart.
COLOURS = ("#6e6e6e", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
# Width and opacity: an exact run often lies on the first curve, which then shows around it.
BASELINE, LINE = (6.0, 0.55), (2.2, 1.0)
INK, PAPER, GRID = "#222222", "#ffffff", "#e6e6e6"


@dataclass(frozen=True)
class Curve:
    """One run: held-out loss (nats per byte) at times (seconds of training)."""

    label: str
    seconds: Sequence[float]
    loss: Sequence[float]


@dataclass(frozen=True)
class Figure:
    """What the picture says, and what it stands on."""

    title: str
    subtitle: str
    curves: Sequence[Curve]


X_LABEL = "seconds of training"
Y_LABEL = "held-out loss, nats per byte"


def save_png(figure: Figure, path: Path) -> None:
    """Draws with matplotlib; names stand at the ends of the lines, so nobody searches a legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK})
    canvas, axes = plt.subplots(figsize=(10, 5.6), dpi=150, facecolor=PAPER)
    longest = max(curve.seconds[-1] for curve in figure.curves)
    for i, (curve, colour, (dx, dy)) in enumerate(
        zip(figure.curves, COLOURS, _label_places(figure), strict=False)
    ):
        width, alpha = LINE if i else BASELINE
        axes.plot(curve.seconds, curve.loss, color=colour, linewidth=width, alpha=alpha)
        axes.plot(curve.seconds[-1], curve.loss[-1], "o", color=colour, markersize=7)
        axes.annotate(
            f"{curve.label}\n{curve.seconds[-1]:.0f} s",
            (curve.seconds[-1], curve.loss[-1]),
            xytext=(dx, dy),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            fontsize=10,
            ha="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 4},
        )
    axes.set_xlim(0, longest * 1.08)
    low, high = _loss_range(figure)
    axes.set_ylim(low, high)
    axes.set_xlabel(X_LABEL)
    axes.set_ylabel(Y_LABEL)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(figure.title, loc="left", fontsize=14, fontweight="bold", pad=28)
    axes.text(0, 1.03, figure.subtitle, transform=axes.transAxes, fontsize=10, color="#555555")
    canvas.tight_layout()
    canvas.savefig(path)
    plt.close(canvas)


def save_html(figure: Figure, path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Draws with plotly, which is written into the page; `rows` is a table, its head first."""
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs

    low, high = _loss_range(figure)
    traces: list[Any] = [
        go.Scatter(
            x=list(curve.seconds),
            y=list(curve.loss),
            name=curve.label,
            mode="lines+markers",
            line={"color": colour, "width": 1.4 * (LINE if i else BASELINE)[0]},
            marker={"size": 5},
            opacity=(LINE if i else BASELINE)[1],
            hovertemplate="%{x:.1f} s: %{y:.3f}<extra>" + curve.label + "</extra>",
        )
        for i, (curve, colour) in enumerate(zip(figure.curves, COLOURS, strict=False))
    ]
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": INK}
    layout = go.Layout(
        xaxis={"title": {"text": X_LABEL}, "rangemode": "tozero", **axis},
        yaxis={"title": {"text": Y_LABEL}, "range": [low, high], **axis},
        plot_bgcolor=PAPER,
        paper_bgcolor=PAPER,
        font={"family": "system-ui, sans-serif", "color": INK, "size": 14},
        legend={"x": 0.99, "y": 0.99, "xanchor": "right", "yanchor": "top"},
        margin={"l": 70, "r": 20, "t": 20, "b": 60},
        height=520,
        hovermode="closest",
    )
    chart = go.Figure(traces, layout).to_html(
        include_plotlyjs=False, full_html=False, config={"displaylogo": False, "responsive": True}
    )
    path.write_text(
        _PAGE.format(
            title=figure.title,
            subtitle=figure.subtitle,
            script=get_plotlyjs(),
            chart=chart,
            head="".join(f"<th>{cell}</th>" for cell in rows[0]),
            body="".join(_row(row, colour) for row, colour in zip(rows[1:], COLOURS, strict=False)),
        )
    )


def _loss_range(figure: Figure) -> tuple[float, float]:
    """From below the best to what the first evaluations after the start had."""
    low = min(min(curve.loss) for curve in figure.curves)
    high = max(curve.loss[min(1, len(curve.loss) - 1)] for curve in figure.curves)
    room = 0.12 * (high - low) or 0.1
    return low - 2.2 * room, high + room


def _label_places(figure: Figure) -> list[tuple[float, float]]:
    """Offsets of the labels in points: below their ends, two rows where ends lie close together."""
    longest = max(curve.seconds[-1] for curve in figure.curves)
    order = sorted(range(len(figure.curves)), key=lambda i: figure.curves[i].seconds[-1])
    places = [(0.0, -44.0)] * len(figure.curves)
    above, last = False, -1.0
    for i in order:
        end = figure.curves[i].seconds[-1] / longest
        above = end - last < 0.17 and not above
        places[i] = (0.0, 26.0) if above else (0.0, -44.0)
        last = end
    return places


def _row(row: Sequence[str], colour: str) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
    return f'<tr><td><b style="color:{colour}">{row[0]}</b></td>{cells}</tr>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2em auto;
         padding: 0 1em }}
  h1 {{ font-size: 1.5em; margin: 0 }}
  p {{ color: #555; margin: .3em 0 1em }}
  table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
  th, td {{ padding: .35em .8em; border-bottom: 1px solid #ddd; text-align: right }}
  th:first-child, td:first-child {{ text-align: left }}
</style>
<script>{script}</script>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
{chart}
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
</body>
</html>
"""
