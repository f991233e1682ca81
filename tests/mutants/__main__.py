"""Mutation tests: do the tests notice small mistakes in the sources?

    python -m tests.mutants                  # all, in an hour on one quiet core
    python -m tests.mutants --only NAME...   # mutants by name, or those of a file or folder

Each mutant is one mistake that a reviewer fears, with the tests that should notice it. It is made
in a copy of the tree, in build/mutants, which is compiled again if it is in C++.

First the tests run without any mutant: they must pass, at the second time at the latest. A mutant
whose tests then fail is caught; one whose tests do not end in twenty minutes is caught, too, and
counted as hung. The exit status is 1 if one escapes, or if one does not fit the sources any more.
Results are in bench/results/mutants.csv; its tests have the names that they had at its commits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from tests.mutants.catalogue import MUTANTS, Mutant, Stale
from tests.mutants.staged import ROOT, BuildFailed, Ran, Staged, run

BUILD = ROOT / "build" / "mutants"
RESULTS = ROOT / "bench" / "results" / "mutants.csv"
LIMIT = 1200.0  # seconds of a run
OUTCOMES = {"passed": "escaped", "failed": "caught", "hung": "hung", "nothing": "broken"}


def main() -> int:
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=about)
    what = "names, files, folders"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=what)
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or any(map(m.fits, args.only))]
    for word in args.only:
        if not any(mutant.fits(word) for mutant in chosen):
            print(f"no mutant is called {word}, and none is of such a file")
            return 2
    copy, begin = Staged(BUILD), time.monotonic()
    try:
        print(f"preparing {copy.folder}", flush=True)
        copy.update(compiled=any(mutant.compiled for mutant in chosen))
    except BuildFailed as error:
        print(f"the build failed:\n{error}")
        return 2
    passing = _passing(copy, chosen)
    origin = asdict(Origin.here("make mutants"))
    outcomes: Counter[str] = Counter()
    for mutant in chosen:
        outcome, ran = _try(copy, mutant, passing)
        outcomes[outcome] += 1
        by, seconds = (ran.by, ran.seconds) if ran else ("", 0.0)
        print(f"{outcome:<8}{seconds:6.1f} s  {mutant.name}{f' by {by}' if by else ''}", flush=True)
        result = {"outcome": outcome, "by": by, "seconds": f"{seconds:.1f}", **origin}
        _write(mutant, result)  # at once: a run of an hour may be interrupted
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{len(chosen)} mutants in {time.monotonic() - begin:.0f} s: {counts}")
    return 0 if outcomes["caught"] + outcomes["hung"] == len(chosen) else 1


def _passing(copy: Staged, chosen: Sequence[Mutant]) -> set[str]:
    """Run all tests without a mutant, and once more if they fail; return those that pass."""
    wanted = list(dict.fromkeys(test for m in chosen for test in m.arguments))
    print(f"running {len(wanted)} files and tests without a mutant", flush=True)
    passing: set[str] = set()
    for test in wanted:
        for _ in range(2):
            ran = run(copy, [test], LIMIT)
            print(f"{ran.outcome:<8}{ran.seconds:6.1f} s  {test}", flush=True)
            if ran.outcome == "passed":
                passing.add(test)
                break
        else:
            print(ran.output[-3000:], flush=True)
    return passing


def _try(copy: Staged, mutant: Mutant, passing: set[str]) -> tuple[str, Ran | None]:
    """Return what has become of a mutant, and what its tests said if they have run."""
    if not passing >= set(mutant.arguments):
        print(f"{mutant.name}: without it its tests do not pass")
        return "broken", None
    try:
        with copy.changed(mutant):
            ran = run(copy, mutant.arguments, LIMIT)
    except (Stale, BuildFailed) as error:
        print(error)
        return "stale", None
    if ran.outcome == "nothing":
        print(f"{mutant.name}: no test has run\n{ran.output[-2000:]}")
    return OUTCOMES[ran.outcome], ran


def _write(mutant: Mutant, result: Mapping[str, object], path: Path = RESULTS) -> None:
    """Write the row of a mutant in the place of its earlier one, and drop those of no mutant."""
    rows: dict[str, dict[str, object]] = {}
    if path.exists():
        rows = {row["name"]: dict(row) for row in tables.read(path)}
    rows[mutant.name] = {"name": mutant.name, **result}
    made = [rows[m.name] for m in MUTANTS if m.name in rows]
    tables.write(path, list(rows[mutant.name]), made)


if __name__ == "__main__":
    sys.exit(main())
