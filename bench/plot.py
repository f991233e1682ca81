"""Figures of README and docs, from bench/results or from tables of the same names elsewhere.

    python -m pycomm.bench.plot --docs     the figures of README and docs, into docs/img
    python -m pycomm.bench.plot loss       only this one of them
    python -m pycomm.bench.plot loss --results mine --out mine    of mine/demo-cpu.csv
    python -m pycomm.bench.plot --check    says what is out of date, or mixes rows that differ in
                                           more than what is shown; exit status 1 if anything is

A figure declares which columns its lines and points show. All other columns that were set and not
measured have one value: else lines would differ by more than what the figure shows.

A picture holds the digest of the chart that it shows. Whether it is out of date thus depends on the
contents of its table, not on the time of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from pycomm.bench.__main__ import reported
from pycomm.bench.common import tables
from pycomm.bench.common.arguments import Parser, one_of
from pycomm.bench.common.harness import MEASURED, Origin
from pycomm.bench.common.tables import Row
from pycomm.bench.figures import charts
from pycomm.bench.figures.drawing import digest, picture_digest, save

ROOT = Path(__file__).parent.parent
IMAGES = Path("docs/img")
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
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(reported(partial(main, sys.argv[1:])))
