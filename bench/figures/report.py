"""`python -m pycomm.bench report`: what docs say was measured, measured again and written.

    python -m pycomm.bench report --measure --only demo,links    repeat measurements
    python -m pycomm.bench report --tables                       write the tables of docs

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
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.common.arguments import Parser
from pycomm.bench.common.report import JUDGED

CLAIMS = tables.read(Path(__file__).with_name("claims.csv"))
"""What docs claim: the table and the command of each claim. `quick` has the commands of `make
bench`, which together take half an hour; a claim without any takes too long for it."""
LIMIT = 1500.0  # seconds per command


def commands() -> Iterator[tuple[str, str]]:
    """Yield the tables and commands of `make bench`."""
    for claim in CLAIMS:
        for words in filter(None, claim["quick"].split("; ")):
            yield claim["table"], words


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
        good = status in (0, JUDGED) and fresh.exists()
        rows = f"{merge(results / table, fresh)} rows" if good else "no rows"
        verdict = f", status {status}: see {log}" if status else ""
        print(f"{time.monotonic() - begin:6.0f} s  {rows}{verdict}", flush=True)
        return good


def measure(chosen: Sequence[tuple[str, str]], results: Path, log: Path) -> bool:
    """Run the commands; return whether all have succeeded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    log.parent.mkdir(parents=True, exist_ok=True)
    good = True
    for number, (table, words) in enumerate(chosen, start=1):
        print(f"{number:>2}/{len(chosen)} {table}: python -m {spell(words)}", flush=True)
        good &= run(table, words, results.resolve(), log.resolve())
    return good


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench report", description=__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=tables.RESULTS, help="folder of the tables")
    does = parser.add_mutually_exclusive_group(required=True)
    does.add_argument("--measure", action="store_true", help="repeat the measurements")
    does.add_argument("--tables", action="store_true", help="write the tables of docs")
    add("--only", default="", help="of --measure: beginnings of tables' names, comma-separated")
    add("--log", type=Path, default=Path("build/bench.log"), help="what commands print")
    options = parser.parse_args(argv)
    if options.tables:
        parser.refuse(argv, "--tables", "results", "only", "log")
        from pycomm.bench.figures import docs  # needs torch

        docs.write_all(CLAIMS)
        return 0
    names = tuple(filter(None, options.only.split(",")))
    chosen = [one for one in commands() if not names or one[0].startswith(names)]
    if not chosen:
        parser.error(f"no table begins with {options.only!r}")
    return 0 if measure(chosen, options.results, options.log) else 1
