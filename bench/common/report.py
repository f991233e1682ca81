"""Printed results: a table that grows row by row, and ratios between backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin, Row, format_size, record, write_json

Column = tuple[str, int, str]
"""name of a value, its width (below 0: on the left), its number format"""


def head(columns: Sequence[Column]) -> str:
    """Return the line above a table."""
    return " ".join(_aligned(TITLES.get(name, name), width) for name, width, _ in columns)


def line(columns: Sequence[Column], values: Mapping[str, Any]) -> str:
    """Return a line of a table; a value that is None or not there is a dash."""
    cells = []
    for name, width, spec in columns:
        value = values.get(name)
        cells.append(_aligned("-" if value is None else format(value, spec), width))
    return " ".join(cells).rstrip()


def _aligned(text: str, width: int) -> str:
    return f"{text:>{width}}" if width > 0 else f"{text:<{-width}}"


@dataclass
class Report:
    """Prints and keeps rows as they arrive."""

    columns: Sequence[Column]
    """of :class:`Row`"""
    quiet: bool = False
    """keep rows and print nothing: for ranks other than 0"""
    rows: list[Row] = field(default_factory=list)

    def header(self, *comments: str) -> None:
        for comment in comments:
            self.note(f"# {comment}")
        self.note(head(self.columns))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.note(line(self.columns, vars(row) | {"size": format_size(row.size)}))

    def note(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def save(self, origin: Origin, *, json_path: str | None, csv_path: str | None) -> None:
        records = [record(row, origin) for row in self.rows]
        if json_path:
            write_json(Path(json_path), records)
        if csv_path:
            tables.append(Path(csv_path), records)


TITLES = {
    "time_p50": "p50(us)",
    "time_p99": "p99(us)",
    "time_device": "GPU(us)",
    "wrong": "#wrong",
    "wire_bytes": "wire(B)",
    "cpu_seconds": "cpu(s)",
    "of_copy": "of copy",
}


def ratios(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Return each row relative to the exact row of `baseline` of the same case.

    Codecs average; where no exact average exists, they are compared with sums.
    """

    def case(row: Row, redop: str) -> tuple[object, ...]:
        return row.op, row.size, row.type, redop, row.place

    exact = [r for r in rows if r.kind == "time" and r.backend == baseline and r.codec == "none"]
    base = {case(r, r.redop): r for r in exact}
    for row in rows:
        if row.codec != "none" and case(row, "sum") in base:
            base.setdefault(case(row, row.redop), base[case(row, "sum")])
    return [
        replace(
            row,
            kind="ratio",
            vs=baseline,
            time_p50=_over(other.time_p50, row.time_p50),
            time_p99=_over(other.time_p99, row.time_p99),
            effbw=_over(row.effbw, other.effbw),
            algbw=None,
            busbw=None,
        )
        for row in rows
        if row.kind == "time" and row.backend != baseline
        for other in [base.get(case(row, row.redop))]
        if other is not None
    ]


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
