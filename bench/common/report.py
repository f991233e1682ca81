"""Results of a command: a table that grows row by row, and a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.common.harness import COLUMNS, Origin, Row, record

JUDGED = 3
"""Exit status of a measurement whose rows count, and break a promise."""


@dataclass(frozen=True)
class Column:
    """A column of a printed table."""

    name: str
    """of the value in a row"""
    width: int
    """below 0: on the left"""
    spec: str | Callable[[Any], str] = ""
    """a number's format, or what spells a value"""
    title: str = ""
    """empty: the name"""
    factor: float | None = None
    """what a number is multiplied by"""

    def head(self) -> str:
        return self._aligned(self.title or self.name)

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the value of a row; one that is None or not there is a dash."""
        value = row.get(self.name)
        if value is None:
            return self._aligned("-")
        if self.factor is not None:
            value *= self.factor
        return self._aligned(self.spec(value) if callable(self.spec) else format(value, self.spec))

    def _aligned(self, text: str) -> str:
        return f"{text:>{self.width}}" if self.width > 0 else f"{text:<{-self.width}}"


class Report:
    """Prints rows as they come, keeps them, and appends each to a CSV at once: what comes later may
    be cut off.

    Args:
        columns: of the printed table.
        options: of `arguments.Parser`: the command, and its `csv`; None: there is no file.
        quiet: keep rows and do nothing else: for ranks other than 0.
        device: on which was measured; empty: the processor.
        hidden: of rows that are no `Row`: what they have beside the printed columns.

    Raises:
        OtherTable: the CSV has other columns, which is told before anything is measured.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        options: argparse.Namespace | None = None,
        *,
        quiet: bool = False,
        device: str = "",
        hidden: Sequence[str] | None = None,
    ) -> None:
        self.columns, self.quiet = columns, quiet
        self.origin = Origin.here(options.command if options else "")
        if device:
            self.origin = replace(self.origin, device=device)
        self.rows: list[Any] = []
        self._csv = Path(options.csv) if options and options.csv and not quiet else None
        if self._csv:
            known = COLUMNS if hidden is None else [*(c.name for c in columns), *hidden]
            tables.header(self._csv, [*known, *vars(self.origin)])

    def header(self, *comments: str) -> None:
        for comment in comments:
            self.note(f"# {comment}")
        self.note(" ".join(column.head() for column in self.columns))

    def add(self, row: Row | dict[str, Any]) -> None:
        values = row if isinstance(row, dict) else vars(row)
        self.note(" ".join(column.cell(values) for column in self.columns).rstrip())
        self.rows.append(row)
        if self._csv:
            tables.append(self._csv, [record(row, self.origin)])

    def note(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; all columns but the first `left` are right-aligned numbers."""
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))
