"""The picture of `bench step`: bars of the steps beside their bounds."""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.bench.common.tables import Row
from pycomm.bench.figures.drawing import Axis, Chart, Panel, Series
from pycomm.plan.units import format_rate, parse_rate

ALONE = "alone"


def picture(rows: Sequence[Row]) -> Chart:
    """Return the chart: a panel for the fastest and one for the slowest link."""
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
        panels.append(Panel(Axis("ms"), y, bars, f"Links of {format_rate(parse_rate(rate)[0])}"))
    first = rows[0]
    return Chart(
        "Training steps beside what the link allows",
        f"Transformer of {int(first['parameters']) / 1e6:.1f} million parameters, DDP on "
        f"{first['ranks']} ranks; {first['device']}; lower is better",
        panels,
    )


def _ms(seconds: str) -> float:
    return 1e3 * float(seconds) if seconds not in ("", "None") else 0.0
