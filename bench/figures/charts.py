"""Charts of the result tables: what each draws of the rows that plot.py chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm.bench.common import harness, tables
from pycomm.bench.common.tables import Row
from pycomm.bench.figures.drawing import GREY, chart, line, panel
from pycomm.units import format_rate, parse_rate

KIND_METHODS = (
    "exact",
    "int8",
    "int4",
    "EDEN 2 bits of 128",
    "coded momentum, sign",
    "coded momentum, top-k 1 %",
    "LocalSGD, int4",
)
LOSS = "held-out loss, nats per byte"


@chart
def loss(rows: Sequence[Row]) -> Any:
    """Plot the loss of the demo's runs against wall time."""
    first = rows[0]
    gpu, driver, _ = first["device"].partition(" (driver ")
    figure, axes = panel(
        "Loss against wall time",
        f"Byte-level transformer of {int(first['parameters']) / 1e6:.1f} million parameters, DDP "
        f"on 2 ranks{f' on {gpu}' if driver else ''}, a link of {_link(first['rate'])}; "
        f"{first['steps']} equal steps in each run",
    )
    curves = [list(tables.parse_curve(row["curve"]).items()) for row in rows]
    for row, curve in zip(rows, curves, strict=True):
        line(axes, f"{row['run']}: {curve[-1][0]:.0f} s", curve, base=row is first)
    low = min(y for curve in curves for _, y in curve)
    high = max(curve[min(1, len(curve) - 1)][1] for curve in curves)  # the first one is chance
    room = 0.12 * (high - low) or 0.1
    axes.set(xlabel="seconds of training", xlim=(0, None))
    axes.set(ylabel=LOSS, ylim=(low - room, high + room))
    return figure


@chart
def kinds(rows: Sequence[Row]) -> Any:
    """Plot what each method changes on each task, beside the spread of the exact runs."""
    from pycomm.bench.training import suite, tasks  # torch, which no other chart needs

    changes, spreads = suite.changes(harness.rows_of(rows, harness.Row))
    models = list(dict.fromkeys(row["model"] for row in rows))[::-1]
    seeds = len({row["seed"] for row in rows})
    figure, axes = panel(
        "Loss by kind of task",
        f"Held-out loss against exact gradients, {rows[0]['ranks']} ranks, AdamW, mean of {seeds} "
        "seeds; left is better",
    )
    axes.barh(
        range(len(models)),
        [2 * spreads[task] for task in models],
        left=[-spreads[task] for task in models],
        label="spread of exact runs",
        color=GREY,
        alpha=0.35,
    )
    for method in KIND_METHODS[1:]:
        of = changes[method]
        points = [(of[task], place) for place, task in enumerate(models) if task in of]
        axes.plot(*zip(*points, strict=True), linestyle="", label=method)
    axes.set_xscale("symlog", linthresh=2)
    ticks = (-10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50)
    axes.xaxis.set_ticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.xaxis.minorticks_off()
    names = [f"{task} *" if tasks.TASKS[task].kept_back else task for task in models]
    axes.yaxis.set_ticks(range(len(models)), names)
    axes.set(xlabel="change of the loss, %        * no constant was chosen on it")
    return figure


def _link(rate: str) -> str:
    """Format "200mbit" as "200 Mbit/s"."""
    return format_rate(parse_rate(rate)[0])
