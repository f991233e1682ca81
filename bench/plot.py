"""Figures of README and docs, from bench/results or from tables of the same names elsewhere.

    python -m pycomm.bench.plot --docs     the figures of README and docs, into docs/img
    python -m pycomm.bench.plot loss       only this one of them
    python -m pycomm.bench.plot loss --results mine --out mine    of mine/demo-cpu.csv
    python -m pycomm.bench.plot --check    says what is out of date, or mixes rows of several
                                           commands or machines; exit status 1 if anything does

A figure declares which columns its lines and points show. Its rows are those of one command on one
machine: else lines would differ by more than what the figure shows.

A picture holds the digest of the chart that it shows. Whether it is out of date thus depends on the
contents of its table, not on the time of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pycomm.bench.__main__ import reported
from pycomm.bench.common import tables
from pycomm.bench.common.arguments import Parser, one_of
from pycomm.bench.common.tables import Row
from pycomm.bench.figures import charts
from pycomm.bench.figures.drawing import digest, picture_digest, save

ROOT = Path(__file__).parent.parent
IMAGES = Path("docs/img")


@dataclass(frozen=True)
class Figure:
    """A picture, docs/img/NAME.png, and the source of its data."""

    name: str
    table: str
    """the table's file name in bench/results"""
    chart: Callable[[Sequence[Row]], Any]
    shown: Sequence[str]
    """columns in which lines and points differ; of rows that are equal in them the newest counts"""
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by column: the values of the rows that are shown"""
    shared: Sequence[str] = ("command", "device", "cores")
    """columns that have one value: rows are of one command, with all that was set, on a machine"""

    def rows(self, results: Path) -> list[Row]:
        """Return the rows that the figure shows."""
        found = (
            row
            for row in tables.read(results / self.table)
            if all(row[column] in allowed for column, allowed in self.where.items())
        )
        return tables.newest(found, *self.shown)

    def mixtures(self, results: Path) -> list[str]:
        """Return a sentence for each column in which rows differ that are drawn as equals."""
        rows = self.rows(results)
        values = {column: {row[column] for row in rows} for column in self.shared}
        return [
            f"{self.name}: {column} is {' and '.join(sorted(found))} in the rows"
            for column, found in values.items()
            if len(found) > 1
        ]

    def of(self, results: Path) -> Any:
        """Return the chart of a folder's table.

        Raises:
            ValueError: it has no such rows, or the chart would mix rows that differ in more than
                what it shows.
        """
        rows = self.rows(results)
        if wrong := self.mixtures(results) or [f"{self.table} has no rows for it"] * (not rows):
            raise ValueError("; ".join(wrong))
        return self.chart(rows)


FIGURES = (
    Figure("loss", "demo-cpu.csv", charts.loss, ("run",)),
    Figure(
        "kinds",
        "suite-cpu.csv",
        charts.kinds,
        ("model", "method", "seed"),
        {"kind": ["suite"], "method": charts.KIND_METHODS},
        shared=(),  # losses do not depend on the machine
    ),
)


def faults(root: Path, figures: Sequence[Figure] = FIGURES) -> list[str]:
    """Return the problems of the committed figures, one sentence each.

    Args:
        root: the root of a checkout.
        figures: the expected figures.
    """
    images = root / IMAGES
    made = {images / f"{figure.name}.png": figure for figure in figures}
    wrong = []
    for path, figure in made.items():
        mixed = figure.mixtures(root / "bench/results")
        if mixed:
            wrong += mixed
        elif not path.exists():
            wrong.append(f"{path.name} has not been drawn")
        elif picture_digest(path) != digest(figure.of(root / "bench/results")):
            wrong.append(f"{path.name} shows something else than {figure.table}: draw it again")
    strangers = sorted(path.name for path in images.glob("*") if path not in made)
    return wrong + [f"{name} lies in {IMAGES}, and nothing makes it" for name in strangers]


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench.plot", description=__doc__)
    names = [figure.name for figure in FIGURES]
    what = f"of docs: {', '.join(names)}"
    known = one_of("figure", names)
    parser.add_argument("figures", nargs="*", type=known, metavar="FIGURE", help=what)
    parser.add_argument("--docs", action="store_true", help="draw all figures of docs")
    parser.add_argument("--check", action="store_true", help="draw nothing, say what is wrong")
    parser.add_argument("--results", type=Path, default=tables.RESULTS, help="folder of the tables")
    parser.add_argument("--out", type=Path, default=ROOT / IMAGES, help="folder of the pictures")
    options = parser.parse_args(argv)
    if options.check:
        parser.refuse(argv, "--check", "figures", "results", "out")
        wrong = faults(ROOT)
        for sentence in wrong:
            print(sentence)
        return 1 if wrong else 0
    chosen = names if options.docs else options.figures
    if not chosen:
        parser.error("name a figure, or write --docs")
    try:
        for figure in FIGURES:
            if figure.name in chosen:
                path = options.out / f"{figure.name}.png"
                save(figure.of(options.results), path)
                print(path)
    except KeyError as error:
        parser.error(f"the table has no column {error}")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(reported(partial(main, sys.argv[1:])))
