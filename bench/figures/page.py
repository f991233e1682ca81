"""`python -m pycomm.bench report`: all figures as one interactive page, and as pictures.

    python -m pycomm.bench report --html report.html --png pictures

The page embeds plotly and needs no network. Each figure is followed by the command that made its
table, and by the commit and the machine of its newest rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.figures.catalogue import FIGURES, Figure
from pycomm.charts import Section, save_page, save_png

INTRO = (
    "What pycomm's benchmarks have measured, from the tables in bench/results. Point at a line for "
    "its figures, click on a name to hide it, drag to zoom in."
)


def section(figure: Figure, results: Path) -> Section:
    """Return a figure with its command, commit and machine."""
    last = max(tables.read(results / figure.table), key=lambda row: row["time"])
    origin = (
        f"From {figure.table}, newest rows of {last['time'][:10]}: commit {last['commit']}, "
        f"{last['device']}, {last['cores']} cores, Linux {last['kernel']}, torch {last['torch']}."
    )
    notes = [note for note in (figure.note, origin) if note]
    return Section(figure.of(results), notes, figure.command)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench report",
        description="Writes all figures as one interactive page, and as pictures.",
    )
    add = parser.add_argument
    add("--results", type=Path, default=tables.RESULTS, help="folder of the tables")
    add("--html", type=Path, default=Path("report.html"), help="the page (report.html)")
    add("--png", type=Path, help="folder for pictures, which are then written, too")
    options = parser.parse_args(argv)
    missing = [figure for figure in FIGURES if not (options.results / figure.table).exists()]
    for figure in missing:
        print(f"no {options.results / figure.table}: {figure.command}", file=sys.stderr)
    there = [figure for figure in FIGURES if figure not in missing]
    if not there:
        return 1
    sections = [section(figure, options.results) for figure in there]
    try:
        save_page("pycomm: results", INTRO, sections, options.html)
        print(options.html)
        if options.png:
            options.png.mkdir(parents=True, exist_ok=True)
            for figure, made in zip(there, sections, strict=True):
                save_png(made.chart, options.png / f"{figure.name}.png")
                print(options.png / f"{figure.name}.png")
    except ImportError as error:
        parser.exit(1, f"{error}; pip install 'pycomm[bench]'\n")
    return 0
