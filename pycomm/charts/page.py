"""Charts as a page that works offline: the page contains plotly, which draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path
from typing import Any

from pycomm.charts.chart import FAINT, GRID, INK, PAPER, Axis, Chart, Panel, Series, looks

SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "pentagon", "cross", "x")


@dataclass(frozen=True)
class Section:
    """One chart of a page, with its notes, command and table."""

    chart: Chart
    notes: Sequence[str] = ()
    """Sentences below the chart."""
    command: str = ""
    """The command that produces its data."""
    table: Sequence[Sequence[str]] = ()
    """Rows of cells, the head first; the first column may name series, and takes their colours."""


def save_page(title: str, intro: str, sections: Sequence[Section], path: Path) -> None:
    """Write a page.

    Raises:
        ImportError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    many = len(sections) > 1
    links = [f'<a href="#s{i}">{escape(s.chart.title)}</a>' for i, s in enumerate(sections)]
    body = "\n".join(_section(i, section) for i, section in enumerate(sections))
    path.write_text(
        _PAGE.format(
            title=escape(title),
            intro=escape(intro),
            contents=f"<nav>{' '.join(links)}</nav>" if many else "",
            script=get_plotlyjs(),
            body=body,
        )
    )


def _section(index: int, section: Section) -> str:
    chart = section.chart
    drawn = figure(chart).to_html(
        include_plotlyjs=False,
        full_html=False,
        default_height="460px",
        config={"displaylogo": False, "responsive": True},
        div_id=f"chart{index}",
    )
    parts = [f'<section id="s{index}"><h2>{escape(chart.title)}</h2>']
    parts += [f"<p>{escape(chart.subtitle)}</p>", drawn]
    parts += [f"<p>{escape(note)}</p>" for note in section.notes]
    if section.table:
        parts.append(_table(section))
    if section.command:
        parts.append(f"<pre>{escape(section.command)}</pre>")
    return "\n".join([*parts, "</section>"])


def figure(chart: Chart) -> Any:
    """Return the chart as a plotly figure, with each name in the legend once, for all panels."""
    from plotly.subplots import make_subplots

    drawn: Any = make_subplots(
        rows=1,
        cols=len(chart.panels),
        subplot_titles=[panel.title for panel in chart.panels],
        horizontal_spacing=0.09,
    )
    named: set[str] = set()
    for column, panel in enumerate(chart.panels, start=1):
        for trace, label in _traces(chart, panel):
            trace.update(legendgroup=label, showlegend=label not in named)
            named.add(label)
            drawn.add_trace(trace, row=1, col=column)
        drawn.update_xaxes(**_axis(panel.x), row=1, col=column)
        drawn.update_yaxes(**_axis(panel.y), row=1, col=column)
    drawn.update_annotations(font={"size": 14})
    drawn.update_layout(
        plot_bgcolor=PAPER,
        paper_bgcolor=PAPER,
        font={"family": "system-ui, sans-serif", "color": INK, "size": 13},
        margin={"l": 70, "r": 10, "t": 34, "b": 60},
        hovermode="closest",
        legend={"title": {"text": "click to hide"}, "groupclick": "togglegroup"},
    )
    return drawn


def _traces(chart: Chart, panel: Panel) -> list[tuple[Any, str]]:
    from plotly import graph_objects

    traces = []
    for guide in panel.guides:
        line = {"color": FAINT, "width": 1.3, "dash": "dot"}
        trace = graph_objects.Scatter(
            x=list(guide.x), y=list(guide.y), name=guide.label, mode="lines", line=line
        )
        trace.update(hoverinfo="skip")
        traces.append((trace, guide.label))
    for series in panel.series:
        look = looks(chart)[series.label]
        trace = graph_objects.Scatter(
            x=list(series.x),
            y=list(series.y),
            name=series.label,
            mode="markers" if series.kind == "points" else "lines+markers",
            opacity=0.55 if series.base else 0.9,
            text=list(series.hover) or _words(series),
            hovertemplate="%{text}<extra></extra>",
        )
        if series.kind == "line":
            width = 7 if series.base else 2.4
            trace.line = {"color": look.colour, "width": width}
            trace.line.dash = "dash" if look.dashed else "solid"
        size = 8 if series.kind == "points" else 5
        symbol = SYMBOLS[look.marker % len(SYMBOLS)]
        trace.marker = {"color": look.colour, "size": size, "symbol": symbol}
        traces.append((trace, series.label))
    return traces


def _words(series: Series) -> list[str]:
    return [f"{series.label}: {x:.4g}, {y:.4g}" for x, y in zip(series.x, series.y, strict=True)]


def _axis(axis: Axis) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "title": {"text": axis.label},
        "gridcolor": GRID,
        "linecolor": FAINT,
        "zeroline": False,
    }
    if axis.log:
        settings |= {"type": "log", "dtick": 1}
    if axis.ticks:
        settings |= {
            "tickmode": "array",
            "tickvals": [place for place, _ in axis.ticks],
            "ticktext": [text for _, text in axis.ticks],
        }
    if axis.limits is not None:
        settings["range"] = [log10(v) for v in axis.limits] if axis.log else list(axis.limits)
    return settings


def _table(section: Section) -> str:
    colours = {label: look.colour for label, look in looks(section.chart).items()}
    head, *rows = section.table
    lines = ["<table><thead><tr>", *(f"<th>{escape(cell)}</th>" for cell in head)]
    lines.append("</tr></thead><tbody>")
    for first, *rest in rows:
        colour = colours.get(first, INK)
        lines.append(f'<tr><td style="color:{colour}"><b>{escape(first)}</b></td>')
        lines += [f"<td>{escape(cell)}</td>" for cell in rest]
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table>"])


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto;
         padding: 0 1em }}
  h1 {{ font-size: 1.6em; margin: 0 }}
  h2 {{ font-size: 1.2em; margin: 2.2em 0 0 }}
  p {{ color: #555; margin: .3em 0 .6em }}
  nav {{ display: flex; flex-wrap: wrap; gap: .3em 1.4em; margin: 1em 0 }}
  a {{ color: #0072b2 }}
  pre {{ background: #f5f5f5; padding: .6em .9em; overflow-x: auto; font-size: .82em }}
  table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
          margin: .8em 0 }}
  th, td {{ padding: .35em .8em; border-bottom: 1px solid #ddd; text-align: right }}
  th:first-child, td:first-child {{ text-align: left }}
</style>
<script>{script}</script>
</head>
<body>
<h1>{title}</h1>
<p>{intro}</p>
{contents}
{body}
</body>
</html>
"""
