"""Figures of README and docs: the rows that each shows, and its chart.

A figure declares which columns name its panels, its lines and the points of a line. All other
columns that were set and not measured have one value in a panel: else lines would differ by more
than what the figure shows, and `Figure.of` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.common.harness import MEASURED, Origin
from pycomm.bench.common.tables import Row
from pycomm.bench.figures import charts

CHECKED = ("device", "cores")
"""Columns of a row's origin that figures must share, too."""
ORIGIN = {f.name for f in fields(Origin)} - set(CHECKED)


@dataclass(frozen=True)
class Figure:
    """A picture, docs/img/NAME.png, and the source of its data."""

    name: str
    table: str
    """the table's file name in bench/results"""
    chart: Callable[[Sequence[Row]], Any]
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by column: the values of the rows that are shown"""
    panel: Sequence[str] = ()
    line: Sequence[str] = ()
    """the first column names a line; the others may differ between lines, and not within one"""
    point: Sequence[str] = ()
    """columns in which the points of a line differ"""
    measured: Sequence[str] = ()
    """columns that were not set: results, and what does not change what is shown"""
    one_run: bool = False
    """the rows are those of the newest command among those that have most lines"""

    def rows(self, results: Path) -> list[Row]:
        """Return the newest row of each setting that the figure shows."""
        found = [
            row
            for row in tables.read(results / self.table)
            if all(row[column] in allowed for column, allowed in self.where.items())
        ]
        if self.one_run:
            found = widest_run(found, self.line[0])
        return tables.newest(found, *self._settings(found))

    def mixtures(self, results: Path) -> list[str]:
        """Return a sentence for each column in which rows differ that are drawn as equals."""
        rows, wrong = self.rows(results), []
        declared = {*self.panel, *self.line, *self.point}
        for column in self._settings(rows):
            within = (*self.panel, self.line[0]) if column in self.line[1:] else tuple(self.panel)
            if column in declared and column not in self.line[1:]:
                continue
            groups: dict[tuple[str, ...], set[str]] = {}
            for row in rows:
                groups.setdefault(tuple(row[c] for c in within), set()).add(row[column])
            for group, values in groups.items():
                if len(values) > 1:
                    place = f" of {', '.join(group)}" if group else ""
                    told = " and ".join(sorted(values))
                    wrong.append(f"{self.name}: {column} is {told} in the rows{place}")
        return wrong

    def of(self, results: Path) -> Any:
        """Return the chart of a folder's table.

        Raises:
            ValueError: it would mix rows that differ in more than what the chart shows.
        """
        mixed = self.mixtures(results)
        if mixed:
            raise ValueError("; ".join(mixed))
        return self.chart(self.rows(results))

    def _settings(self, rows: Sequence[Row]) -> list[str]:
        return [column for column in rows[0] if column not in {*ORIGIN, *self.measured}]


def widest_run(rows: Sequence[Row], column: str) -> list[Row]:
    """Return the rows of the newest command among those that compare most values of a column."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["command"], []).append(row)
    best = max(runs.values(), key=lambda run: (len({r[column] for r in run}), run[-1]["time"]))
    last = max(row["time"][:10] for row in best)
    return [row for row in best if row["time"].startswith(last)]


FIGURES = (
    Figure(
        "loss",
        "demo-cpu.csv",
        charts.loss,
        line=("run", "backend", "codec"),
        measured=("step_seconds", "wire_bytes", "loss", "curve"),
    ),
    Figure(
        "bandwidth",
        "collectives-cpu.csv",
        charts.bandwidth,
        {
            "kind": ["time"],
            "op": ["all_reduce"],
            "ranks": ["2"],
            "codec": ["none"],
            "backend": tuple(charts.BACKENDS),
        },
        line=("backend", "connection"),
        point=("size", "count"),
        measured=MEASURED,
        one_run=True,
    ),
    Figure(
        "steps",
        "steps-cpu.csv",
        charts.steps,
        {"kind": ["step"], "model": ["demo"]},
        line=("method", "backend", "codec", "hook"),
        point=("rate",),
        measured=(*MEASURED, "steps"),
    ),
    Figure(
        "gpu-steps",
        "step-stand-in.csv",
        charts.bars_of_steps,
        {"kind": ["step"]},
        panel=("rate",),
        line=("method", "codec"),
        measured=MEASURED,
    ),
    Figure(
        "gpu-trace",
        "trace-stand-in.csv",
        charts.timeline,
        panel=("model", "method", "rate"),
        line=("stage",),
        point=("bucket",),
        measured=("begin", "end"),
    ),
    Figure(
        "kinds",
        "suite-cpu.csv",
        charts.kinds,
        {"kind": ["suite"], "method": charts.KIND_METHODS},
        panel=("model", "parameters", "steps", "size", "count"),
        line=("method", "codec"),
        point=("seed",),
        measured=(*MEASURED, *CHECKED),
    ),
)
