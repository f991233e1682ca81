"""Charts of the result tables: which columns each figure shows, and its labels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pycomm.bench.common import harness, tables
from pycomm.bench.common.tables import Row
from pycomm.bench.figures.drawing import Axis, Chart, Panel, Series, ticks
from pycomm.bench.ops import errors
from pycomm.plan.units import format_bytes, format_rate, format_time, parse_rate


def lines_of(
    rows: Iterable[Row],
    line: str,
    x: str | Callable[[Row], float],
    y: str | Callable[[Row], float],
    names: Mapping[str, str] | None = None,
    base: str = "",
) -> list[Series]:
    """Return a line of the points (x, y) of each value of a column.

    Args:
        rows: of the table.
        line: the column.
        x, y: columns, or what a row has in their place.
        names: labels by the column's values, in the order of the lines; None: the values.
        base: the value whose line is the baseline.
    """
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in names or ()}
    for row in rows:
        place = [float(row[at]) if isinstance(at, str) else at(row) for at in (x, y)]
        points.setdefault(row[line], []).append((place[0], place[1]))
    return [
        series((names or {}).get(name, name), found, base=name == base)
        for name, found in points.items()
        if found
    ]


def series(label: str, points: Iterable[tuple[float, float]], **style: Any) -> Series:
    """Return a line of points, from left to right."""
    x, y = zip(*sorted(points), strict=True)
    return Series(label, x, y, **style)


def log_axis(label: str, lines: Iterable[Series], spell: Callable[[float], str]) -> Axis:
    """Return a logarithmic axis for the lines' y."""
    every = [value for line in lines for value in line.y]
    return Axis(label, True, ticks(min(every), max(every), spell))


def loss(rows: Sequence[Row]) -> Chart:
    """Plot the loss of the demo's runs against wall time."""
    first = rows[0]
    lines = [
        series(row["run"], tables.parse_curve(row["curve"]), base=row is first) for row in rows
    ]
    low = min(min(line.y) for line in lines)
    high = max(line.y[min(1, len(line.y) - 1)] for line in lines)
    room = 0.12 * (high - low) or 0.1
    x = Axis("seconds of training", limits=(0, 1.08 * max(line.x[-1] for line in lines)))
    y = Axis("held-out loss, nats per byte", limits=(low - room, high + room))
    return Chart(
        "Loss against wall time",
        f"Byte-level transformer of {int(first['parameters']) / 1e6:.1f} million parameters, DDP "
        f"on 2 ranks{_on_gpu(first)}, a link of {_link(first['rate'])}; {first['steps']} equal "
        "steps in each run",
        [Panel(x, y, lines)],
        labels="ends",
    )


def _on_gpu(row: Row) -> str:
    """Return the GPU of a row; "" for a processor."""
    name, driver, _ = row["device"].partition(" (driver ")
    return f" on {name}" if driver else ""


def bandwidth(rows: Sequence[Row]) -> Chart:
    """Plot time and bytes per second of two-rank all-reduces against size."""
    sizes = [int(row["size"]) for row in rows]
    marks = [(size, _size(size)) for size in (8 << shift for shift in range(0, 40, 5))]
    x = Axis("bytes", True, [mark for mark in marks if min(sizes) <= mark[0] <= max(sizes)])

    def panel(column: str, factor: float, label: str, spell: Any, title: str) -> Panel:
        def value(row: Row) -> float:
            return factor * float(row[column])

        lines = lines_of(rows, "backend", "size", value, BACKENDS, "gloo")
        return Panel(x, log_axis(label, lines, spell), lines, title)

    return Chart(
        "All-reduce inside a machine",
        f"{rows[0]['op']} of {rows[0]['type']}{_through(rows[0]['codec'])} by {rows[0]['ranks']} "
        f"ranks on {rows[0]['device']}, all backends in turns",
        [
            panel("time_p50", 1e-6, "time of a call", format_time, "Latency: lower is better"),
            panel("effbw", 1e9, "size / time", _bandwidth, "Bandwidth: higher is better"),
        ],
    )


def _through(codec: str) -> str:
    return "" if codec == "none" else f" through {codec}"


def steps(rows: Sequence[Row]) -> Chart:
    """Plot the time of a training step against the link rate, by method."""
    lines = lines_of(rows, "method", _rate, "seconds", base=BASE_METHOD)
    places = sorted({_rate(row) for row in rows})
    x = Axis("link", True, [(place, format_rate(place)) for place in places])
    return Chart(
        "Training step by link",
        f"Transformer of {int(rows[0]['parameters']) / 1e6:.1f} million parameters, DDP on "
        f"{rows[0]['ranks']} ranks "
        "with one core each, links between network namespaces",
        [Panel(x, log_axis("step", lines, format_time), lines)],
    )


def bars_of_steps(rows: Sequence[Row]) -> Chart:
    """Draw steps beside their bounds: a panel for the fastest link and one for the slowest."""
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: -parse_rate(rate)[0])
    methods = list(dict.fromkeys(row["method"] for row in rows))[::-1]
    marks = [(float(i), name) for i, name in enumerate(methods)]
    panels = []
    for rate in dict.fromkeys((rates[0], rates[-1])):
        mine = {row["method"]: row for row in rows if row["rate"] == rate}
        taken = [float(mine[m]["seconds"]) * 1e3 if m in mine else 0.0 for m in methods]
        bounds = [_ms(mine[m]["bound"]) if m in mine else 0.0 for m in methods]
        places = [at for at, _ in marks]
        bars = [
            Series("the bound B", bounds, places, "bars", base=True),
            Series("step", taken, places, "bars"),
        ]
        y = Axis("", ticks=marks)
        panels.append(Panel(Axis("ms"), y, bars, f"Links of {_link(rate)}"))
    first = rows[0]
    return Chart(
        "Training steps beside what the link allows",
        f"Transformer of {int(first['parameters']) / 1e6:.1f} million parameters, DDP on "
        f"{first['ranks']} ranks; {first['device']}; lower is better",
        panels,
    )


def timeline(rows: Sequence[Row]) -> Chart:
    """Draw the stages of each bucket of a step, and the optimizer, on an axis of time."""
    last = 1 + max(int(row["bucket"]) for row in rows)  # the place of the optimizer
    marks = [(float(last - i), str(i)) for i in range(last)] + [(0.0, "none")]
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        x, y = lines.setdefault(row["stage"], ([], []))
        place = float(last - int(row["bucket"])) if int(row["bucket"]) >= 0 else 0.0
        x += [_ms(row["begin"]), _ms(row["end"])]
        y += [place, place]
    first = rows[0]
    return Chart(
        "The stages of a step",
        f"{first['method']} on links of {_link(first['rate'])}; model {first['model']}; "
        f"{first['device']}",
        [
            Panel(
                Axis("ms"),
                Axis("bucket", ticks=marks),
                [Series(name, x, y, "spans") for name, (x, y) in lines.items()],
            )
        ],
    )


def _ms(seconds: str) -> float:
    return 1e3 * float(seconds) if seconds not in ("", "None") else 0.0


def losses(rows: Sequence[Row]) -> Chart:
    """Plot the loss against steps, as the mean over the seeds, by method."""
    lines = []
    for method in LOSS_METHODS:
        curves = [dict(tables.parse_curve(r["curve"])) for r in rows if r["method"] == method]
        if curves:
            places = [place for place in curves[0] if place <= float(rows[0]["steps"])]
            means = [(at, statistics.fmean(curve[at] for curve in curves)) for at in places]
            name = method.removeprefix("pycomm, ")
            lines.append(series(name, means, base=method == LOSS_METHODS[0]))
    limits = (min(line.y[-1] for line in lines) - 0.08, max(line.y[1] for line in lines) + 0.05)
    return Chart(
        "Loss against steps",
        f"Held-out loss of the demo's model ({int(rows[0]['parameters']) / 1e6:.1f} million "
        f"parameters, {rows[0]['ranks']} ranks, AdamW), mean of the seeds",
        [Panel(Axis("step"), Axis("held-out loss, nats per byte", limits=limits), lines)],
    )


def error(rows: Sequence[Row]) -> Chart:
    """Plot error against bits, by family of codecs, on normal values and on gradients."""
    bits = [0.05 * 1.06**i for i in range(96)]
    bound = Series("least possible", bits, [2.0 ** (-2 * b) for b in bits])
    x = Axis(
        "bits per value", True, [(b, f"{b:g}") for b in (0.1, 0.3, 1, 2, 4, 8, 16)], (0.04, 28)
    )
    powers = [(10.0**p, f"1e{p}" if p else "1") for p in range(-8, 1, 2)]
    y = Axis("relative squared error", True, powers, (1e-8, 4))
    panels = []
    for values, title in (
        (errors.NORMAL, "Normally distributed values"),
        (errors.GRADIENTS, "Gradients of the demo's model, step 100"),
    ):
        mine = [row for row in rows if row["values"] == values]
        names = {family: family for family in errors.FAMILIES}
        lines = [
            line if line.label in errors.LADDERS else replace(line, kind="points")
            for line in lines_of(mine, "family", "bits", "error", names)
        ]
        panels.append(Panel(x, y, lines, title, [bound] if values == errors.NORMAL else []))
    return Chart(
        "What a codec loses, and for how many bits",
        "One coding, without feedback; bits count scales and indices",
        panels,
    )


# ------------------------------------------------------------------------ labels

BASE_METHOD = "Gloo, fp32"
LOSS_METHODS = (
    "pycomm, exact",
    "pycomm, int8",
    "pycomm, int4",
    "pycomm, EDEN 2 bits of 128",
    "pycomm, EDEN 1 bit",
    "pycomm, PowerSGD rank 4",
    "pycomm, top-k 1 %",
    "pycomm, sign",
    "Gloo, PowerSGD rank 4",
)
BACKENDS = {
    "gloo": "Gloo",
    "pycomm": "pycomm",
    "pycomm-shared": "pycomm, shared memory",
}


def _rate(row: Row) -> float:
    """Return bytes per second of a row's link."""
    return parse_rate(row["rate"])[0]


def _link(rate: str) -> str:
    """Format "200mbit" as "200 Mbit/s"."""
    return format_rate(parse_rate(rate)[0])


def _size(size: int) -> str:
    text = harness.format_size(size)
    return f"{text} B" if text.isdigit() else f"{text[:-1]} {text[-1]}iB"


def _bandwidth(rate: float) -> str:
    return f"{format_bytes(rate)}/s"
