"""Figures of README and docs: the rows that each shows, and its chart.

A figure declares which columns its panels, lines and points show. All other columns that were set
and not measured have one value: else lines would differ by more than what the figure shows, and
`Figure.of` raises.
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
    shown: Sequence[str] = ()
    """columns in which panels, lines and points differ"""
    measured: Sequence[str] = ()
    """columns that were not set: results, and what does not change what is shown"""

    def rows(self, results: Path) -> list[Row]:
        """Return the newest row of each setting that the figure shows."""
        found = [
            row
            for row in tables.read(results / self.table)
            if all(row[column] in allowed for column, allowed in self.where.items())
        ]
        return tables.newest(found, *self._settings(found))

    def mixtures(self, results: Path) -> list[str]:
        """Return a sentence for each column in which rows differ that are drawn as equals."""
        rows = self.rows(results)
        values = {column: {row[column] for row in rows} for column in self._settings(rows)}
        return [
            f"{self.name}: {column} is {' and '.join(sorted(found))} in the rows"
            for column, found in values.items()
            if len(found) > 1 and column not in self.shown
        ]

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


FIGURES = (
    Figure(
        "loss",
        "demo-cpu.csv",
        charts.loss,
        shown=("run", "backend", "codec"),
        measured=("step_seconds", "wire_bytes", "loss", "curve"),
    ),
    Figure(
        "gpu-trace",
        "trace-stand-in.csv",
        charts.timeline,
        shown=("model", "method", "rate", "stage", "bucket"),
        measured=("begin", "end"),
    ),
    Figure(
        "kinds",
        "suite-cpu.csv",
        charts.kinds,
        {"kind": ["suite"], "method": charts.KIND_METHODS},
        shown=("model", "parameters", "steps", "size", "count", "method", "codec", "seed"),
        measured=(*MEASURED, *CHECKED),
    ),
)
