"""`make conformance`: PyTorch's suite against pycomm and Gloo, and the page docs/conformance.md.

    python -m tests.conformance --world-size 2,3,4              all, both backends; writes the page
    python -m tests.conformance --backend pycomm -k barrier     a few; writes nothing

Ends 1 if Gloo passes a test that pycomm does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch

from tests.conformance.suite import (
    BOUND_TO_A_NAME,
    NOT_JUDGED,
    NOT_ON_CPU,
    Config,
    Row,
    Runner,
    read,
    worse,
    write,
)

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"

INTRODUCTION = """\
# Conformance

PyTorch tests its own backends with a suite of 285 tests that ships in the wheel
(`torch/testing/_internal/distributed/distributed_test.py`). `make conformance` runs it against
pycomm and Gloo, and writes this page; `tests/conformance/results.csv.xz` has every test.

The suite decides by the *name* of the backend which tests run. pycomm and Gloo take Gloo's place
and then NCCL's (on CPU tensors), with the tests that torch keeps for MPI and for eight ranks. Tests
are counted on 2, 3 and 4 ranks together.

| torch | in the place of | tests | pycomm passes | Gloo passes |
| --- | --- | --- | --- | --- |
"""


def judge(config: Config, log: Path, wanted: list[str], only: set[str] | None) -> list[Row]:
    """Run the suite in one configuration, and print every test that does not pass."""
    rows = []
    with closing(Runner(config, log)) as runner:
        for test in runner.names:
            if (wanted and not any(w in test for w in wanted)) or (only and test not in only):
                continue
            if test in NOT_JUDGED:
                status, seconds, reason = "n/a", 0.0, NOT_JUDGED[test]
            else:
                outcome = runner.run(test)
                status, seconds, reason = outcome.status, outcome.seconds, outcome.reason
                if status in ("fail", "timeout"):
                    print(f"  {status} {test}: {reason}", flush=True)
            reason = " ".join(reason.split())
            rows.append(
                Row(config.like, config.world_size, config.backend, test, status, seconds, reason)
            )
    counts = {s: sum(row.status == s for row in rows) for s in ("pass", "fail", "timeout", "skip")}
    seconds = sum(row.seconds for row in rows)
    print(f"{config}: {counts}, {seconds:.0f} s", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--backend", default="pycomm,gloo")
    parser.add_argument("--like", default="gloo,nccl", help="known backends whose place they take")
    parser.add_argument("-k", action="append", default=[], help="part of a test's name; repeatable")
    parser.add_argument("--log", type=Path, help="what the ranks print; kept if given")
    parser.add_argument(
        "--results", type=Path, help="file to write, as results.csv.xz; default: the committed one"
    )
    given = parser.parse_args(arguments)
    log = given.log or Path(tempfile.mkstemp(suffix=".log")[1])
    print(f"what the ranks print: {log}")

    rows: list[Row] = []
    for world_size in map(int, given.world_size.split(",")):
        # Reserved for NCCL: what torch skips in Gloo's place and has for NCCL's.
        reserved = set()
        for like in given.like.split(","):
            for backend in given.backend.split(","):
                config = Config(backend, world_size, like)
                only = reserved if like == "nccl" and reserved else None
                rows += judge(config, log, given.k, only)
            if like == "gloo":
                reserved = {row.test for row in rows if row.status == "skip"}
    everything = parser.parse_args([])
    if given.results:
        write(rows, given.results)
    elif all(vars(given)[k] == vars(everything)[k] for k in ("world_size", "backend", "like", "k")):
        write(rows)
        write_page(read())
    bugs = worse(rows)
    for row in bugs:
        print(f"Gloo passes and pycomm does not: {row}")
    return 1 if bugs else 0


# ------------------------------------------------------------------ the page


def write_page(rows: list[Row]) -> None:
    """Write the page. `rows` are a full run of both backends, on this torch."""
    runs = {torch.__version__.partition("+")[0]: rows}
    for path in sorted(HERE.glob("results-*.csv.xz")):
        runs[path.name.removeprefix("results-").removesuffix(".csv.xz")] = read(path)
    lines = [line for version, found in runs.items() for line in _lines(version, found)]
    parts = [INTRODUCTION + "\n".join(lines) + "\n"]
    if bugs := [row for found in runs.values() for row in worse(found)]:
        parts.append(_list("Gloo passes, pycomm does not", bugs))
    else:
        parts.append("Every test that Gloo passes, pycomm passes.\n")
    missed = []
    for found in runs.values():
        gloo = {r.key for r in found if r.backend == "gloo" and r.status == "pass"}
        failed = [r for r in found if r.backend == "pycomm" and r.status in ("fail", "timeout")]
        missed += [r for r in failed if r.key not in gloo]
    parts.append(_list("Neither passes", missed))
    parts.append(_not_judged())
    PAGE.write_text("\n".join(parts))


def _lines(version: str, rows: list[Row]) -> list[str]:
    """Return the table's lines of one torch: what passed, of what was not skipped."""
    counts = Counter((r.like, r.backend, r.status) for r in rows)
    lines = []
    for like in sorted({r.like for r in rows}):
        passed = [counts[like, backend, "pass"] for backend in ("pycomm", "gloo")]
        failed = sum(counts[like, "pycomm", status] for status in ("fail", "timeout"))
        cells = version, like, passed[0] + failed, *passed
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _list(title: str, rows: list[Row]) -> str:
    """One line per reason: what a test says there first, and the tests that say so."""
    first: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: (r.test, r.world_size)):
        first.setdefault(row.test, row)
    reasons: dict[str, list[str]] = {}
    for test, row in first.items():
        sizes = ", ".join(sorted({str(r.world_size) for r in rows if r.test == test}))
        said = row.reason[:60].replace("|", "/")
        reasons.setdefault(f"{said} | {sizes}", []).append(f"`{test}`")
    lines = [f"## {title}", "", "| says | ranks | tests |", "| --- | --- | --- |"]
    for reason, tests in reasons.items():
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        lines.append(f"| {reason} | {tests[0]}{more} |")
    return "\n".join(lines) + "\n"


def _not_judged() -> str:
    """Return the section of the tests that say nothing about a CPU backend."""
    counts = {why: len(tests) for why, tests in NOT_ON_CPU.items()}
    counts |= Counter(BOUND_TO_A_NAME.values())
    reasons = (f"{why} ({count})" for why, count in counts.items())
    return f"## Not judged\n\n{'; '.join(reasons)}.\n"


if __name__ == "__main__":
    sys.exit(main())
