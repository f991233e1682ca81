"""`python -m pycomm.bench report`: all figures as one page, from bench/results.

    python -m pycomm.bench report --html report.html
    python -m pycomm.bench report --results mine.csv             of a table of your own
    python -m pycomm.bench report --measure --only demo,links    repeat measurements first
    python -m pycomm.bench report --tables                       write the tables of docs

The page contains its pictures and needs no network. Each figure is followed by its values, the
command that makes its table, and the commit and the machine of its newest rows.

`--measure` runs what takes half an hour on two cores (claims.csv). New rows replace those that the
same command wrote before; rows of other commands stay, since docs cite them. A command that fails
leaves its table as it was, and the others continue.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.common.arguments import Parser
from pycomm.bench.figures.catalogue import FIGURES, Figure, fitting
from pycomm.bench.figures.claims import commands
from pycomm.charts import Section, save_page

INTRO = "What pycomm's benchmarks have measured."
LIMIT = 1500.0  # seconds per command
JUDGED = "plan"
"""Its exit status is 1 where a promise is broken; its rows count."""


# ----------------------------------------------------------------------------- the page


def section(figure: Figure, results: Path) -> Section:
    """Return a figure with its command, commit and machine."""
    notes = [figure.note] if figure.note else []
    last = max(figure.rows(results), key=lambda row: row["time"])
    notes.append(
        f"From {figure.table}, newest rows of {last['time'][:10]}: commit {last['commit']}, "
        f"{last['device']}, {last['cores']} cores, Linux {last['kernel']}, torch {last['torch']}."
    )
    return Section(figure.of(results), notes, figure.command)


def draw(results: Path, html: Path) -> int:
    """Write the page, of a folder's tables or of one table; return the exit status."""
    if results.is_file():
        figures = fitting(results)
        save_page(
            f"pycomm: {results.name}", INTRO, [section(f, results.parent) for f in figures], html
        )
        print(html)
        return 0
    missing = [f for f in FIGURES if not (results / f.table).exists()]
    for figure in missing:
        print(f"no {results / figure.table}: {figure.command}", file=sys.stderr)
    there = [figure for figure in FIGURES if figure not in missing]
    if not there:
        return 1
    save_page("pycomm: results", INTRO, [section(figure, results) for figure in there], html)
    print(html)
    return 0


# ------------------------------------------------------------------------- measurements


def merge(table: Path, fresh: Path) -> int:
    """Replace the rows that have the commands of a new table's rows; return the number of rows."""
    rows = tables.read(fresh)
    done = {row["command"] for row in rows}
    kept = tables.read(table) if table.exists() else []
    kept = [row for row in kept if row["command"] not in done]
    columns = list(dict.fromkeys([*rows[0], *(name for row in kept[:1] for name in row)]))
    tables.write(table, columns, [*kept, *rows])
    return len(rows)


def spell(words: str) -> str:
    """Return the module and its arguments: of pycomm.bench, or with ".demo" of a module in it."""
    return f"pycomm.bench{'' if words.startswith('.') else ' '}{words}"


def run(table: str, words: str, results: Path, log: Path) -> bool:
    """Run one command in a temporary folder, so that its own file names are always the same."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder, "bench/results", table)
        fresh.parent.mkdir(parents=True)
        command = [sys.executable, "-m", *shlex.split(spell(words))]
        command += ["--csv", f"bench/results/{table}"]
        begin = time.monotonic()
        with log.open("a") as output:
            print("#", shlex.join(command[1:]), file=output, flush=True)
            try:
                status = subprocess.run(
                    command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT
                ).returncode
            except subprocess.TimeoutExpired:
                status = 124  # the status of timeout(1)
        good = status in (0, 1 if words.startswith(JUDGED) else 0) and fresh.exists()
        rows = f"{merge(results / table, fresh)} rows" if good else "no rows"
        verdict = f", status {status}: see {log}" if status else ""
        print(f"{time.monotonic() - begin:6.0f} s  {rows}{verdict}", flush=True)
        return good


def measure(chosen: Sequence[tuple[str, str]], results: Path, log: Path, dry: bool) -> bool:
    """Run the commands, or print them; return whether all have succeeded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    log.parent.mkdir(parents=True, exist_ok=True)
    good = True
    for number, (table, words) in enumerate(chosen, start=1):
        print(f"{number:>2}/{len(chosen)} {table}: python -m {spell(words)}", flush=True)
        if not dry:
            good &= run(table, words, results.resolve(), log.resolve())
    return good


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench report", description=__doc__)
    add = parser.add_argument
    what = "folder of the tables, or one table of your own"
    add("--results", type=Path, default=tables.RESULTS, help=what)
    add("--html", type=Path, default=Path("report.html"), help="the page (report.html)")
    add("--measure", action="store_true", help="only: repeat the measurements")
    add("--only", default="", help="of --measure: beginnings of tables' names, comma-separated")
    add("--list", action="store_true", help="of --measure: print the commands")
    add("--log", type=Path, default=Path("build/bench.log"), help="what commands print")
    add("--tables", action="store_true", help="only: write the tables of docs")
    options = parser.parse_args(argv)
    if options.tables:
        from pycomm.bench.figures import docs  # needs torch

        docs.write_all()
        return 0
    if options.measure:
        names = tuple(options.only.split(","))
        chosen = [one for one in commands() if one[0].startswith(names)]
        if not chosen:
            parser.error(f"no table begins with {options.only!r}")
        return 0 if measure(chosen, options.results, options.log, options.list) else 1
    try:
        return draw(options.results, options.html)
    except (ValueError, KeyError) as error:
        parser.error(str(error))
