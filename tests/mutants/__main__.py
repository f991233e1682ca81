"""Mutation tests: how many small mistakes in the sources do the tests notice?

    python -m tests.mutants                      # all, an hour on one quiet core
    python -m tests.mutants --only collectives   # a part, or mutants by name
    python -m tests.mutants --list

Each mutant is one mistake that a reviewer fears, with the tests that should notice it. It works on
a staged copy of the tree, in build/mutants, whose binaries hold all mutants of C++ at once: both
versions of each changed expression are compiled, and a variable of the environment chooses. So
there is one build for all of them. Mutants of Python, Triton and CUDA are put into the copy as
text, one at a time.

First the tests run without any mutant. They must pass, at the second time at the latest, else their
mutants count as broken; their times give the limits. A mutant whose tests then fail is caught; one
whose tests do not end within four times their usual time is caught, too, and counted as hung, if
they do end without it in the time. The exit status is 1 if one escapes that is not marked with a
reason, or if an entry does not fit the sources any more. Results are in bench/results/mutants.csv.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from tests.mutants.mutant import Mutant, Stale
from tests.mutants.parts import PARTS
from tests.mutants.running import Ran, run
from tests.mutants.staged import ROOT, BuildFailed, Staged

BUILD = ROOT / "build" / "mutants"
RESULTS = ROOT / "bench" / "results" / "mutants.csv"
START, FACTOR = 20.0, 4.0  # the limit of a run is START seconds and FACTOR times its usual time
TURNS = 3  # at the most, if the tests do not end without the mutant either
FIRST_LIMIT = 1200.0  # of a test file without a mutant
OUTCOMES = ("caught", "hung", "expected", "escaped", "stale", "broken")


Item = TypeVar("Item")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Result:
    """What has become of a mutant."""

    part: str
    mutant: Mutant
    outcome: str
    seconds: float = 0.0
    by: str = ""

    @property
    def bad(self) -> bool:
        return self.outcome in ("escaped", "stale", "broken")


def main() -> int:
    args = _arguments()
    chosen = [(part, m) for part, ms in PARTS.items() for m in ms if _wanted(part, m, args.only)]
    if not chosen:
        print(f"no mutant and no part is called {' or '.join(args.only)}")
        return 2
    if args.list:
        for part, m in chosen:
            print(f"{part:<14}{m.kind:<12}{m.name:<44}{m.file}: {m.tests}")
        print(f"{len(chosen)} mutants")
        return 0
    results = [_stale(part, m) for part, m in chosen]
    fresh = [(part, m) for (part, m), found in zip(chosen, results, strict=True) if not found]
    stale = [found for found in results if found]
    for result in stale:
        print(f"stale: {result.by}", flush=True)
    try:
        copies = _copies(args.jobs, [mutant for _, mutant in fresh])
    except BuildFailed as error:
        print(f"the build with mutants failed:\n{error}")
        return 2
    usual = _usual(copies, fresh)
    begin = time.monotonic()
    done = _run_all(copies, fresh, usual)
    _show([*stale, *done], time.monotonic() - begin)
    return 1 if any(result.bad for result in [*stale, *done]) else 0


def _arguments() -> argparse.Namespace:
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=about)
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="parts, files or names of mutants")
    add("--list", action="store_true", help="print the mutants, and run none")
    add("--jobs", type=int, default=1, help="mutants at once, each in a copy of the tree (1)")
    return parser.parse_args()


def _wanted(part: str, mutant: Mutant, only: Sequence[str]) -> bool:
    return not only or not {part, mutant.name, mutant.file}.isdisjoint(only)


def _stale(part: str, mutant: Mutant) -> Result | None:
    try:
        mutant.place((ROOT / mutant.file).read_text())
    except (Stale, OSError) as error:
        return Result(part, mutant, "stale", by=str(error))
    return None


def _copies(jobs: int, chosen: Sequence[Mutant]) -> list[Staged]:
    """Return copies of the tree, with the binaries of all mutants if one of C++ is chosen."""
    compiled = any(mutant.form != "text" for mutant in chosen)
    kind = "copy" if compiled else "text"
    copies = [Staged(BUILD / f"{kind}-{number}") for number in range(1, jobs + 1)]
    everything = [m for ms in PARTS.values() for m in ms if not _stale("", m)]
    for copy in copies:
        copy.update(everything if compiled else ())
    if compiled:
        print(f"building {copies[0].folder}, with both versions of each change", flush=True)
        copies[0].build()
    for copy in copies[1:] if compiled else copies:
        copy.take_binaries(copies[0].folder if compiled else ROOT)
    for copy in copies:
        copy.check()
    return copies


def _usual(copies: list[Staged], chosen: Sequence[tuple[str, Mutant]]) -> dict[str, float]:
    """Run all tests without a mutant, and once more if they fail; return their seconds."""
    wanted = list(dict.fromkeys(test for _, m in chosen for test in m.arguments))
    print(f"running {len(wanted)} files and tests without a mutant", flush=True)

    def usual(copy: Staged, test: str) -> float | None:
        for _ in range(2):
            ran = run(copy, [test], None, FIRST_LIMIT)
            print(f"{ran.outcome:<10}{ran.seconds:6.1f} s  {test}", flush=True)
            if ran.outcome == "passed":
                return ran.seconds
        print(ran.output[-3000:], flush=True)
        return None

    times = dict(zip(wanted, _each(copies, wanted, usual), strict=True))
    return {test: seconds for test, seconds in times.items() if seconds is not None}


def _run_all(
    copies: list[Staged], chosen: Sequence[tuple[str, Mutant]], usual: dict[str, float]
) -> list[Result]:
    writing = threading.Lock()
    origin = asdict(Origin.here("make mutants"))

    def result(copy: Staged, entry: tuple[str, Mutant]) -> Result:
        part, mutant = entry
        if failing := [test for test in mutant.arguments if test not in usual]:
            print(f"broken: {mutant.name}: without it {failing[0]} does not pass", flush=True)
            return Result(part, mutant, "broken")
        limit = START + FACTOR * sum(usual[test] for test in mutant.arguments)
        text = mutant.form == "text"
        for _ in range(TURNS):
            with copy.with_text_of(mutant) if text else nullcontext():
                ran = run(copy, mutant.arguments, mutant, limit)
            # A busy machine is not the mutant's fault: without it the tests must be done in time.
            if ran.outcome != "hung" or run(copy, mutant.arguments, None, limit).outcome != "hung":
                break
            limit *= 4
        found = _judged(part, mutant, ran)
        never = found.bad and not text and not ran.reached
        more = " (its code never ran)" if never else f" by {found.by}" if found.by else ""
        print(f"{found.outcome:<10}{found.seconds:6.1f} s  {mutant.name}{more}", flush=True)
        with writing:  # at once: a run of an hour may be interrupted
            _write(found, origin)
        return found

    return _each(copies, chosen, result)


def _judged(part: str, mutant: Mutant, ran: Ran) -> Result:
    escaped = "expected" if mutant.escapes else "escaped"
    outcome = {"passed": escaped, "failed": "caught", "hung": "hung", "nothing": "broken"}
    if ran.outcome == "nothing":
        print(f"{mutant.name}: no test has run\n{ran.output[-2000:]}", flush=True)
    return Result(part, mutant, outcome[ran.outcome], ran.seconds, ran.by)


def _each(
    copies: list[Staged], items: Sequence[Item], do: Callable[[Staged, Item], Out]
) -> list[Out]:
    """Return do(copy, item) for all items; each copy works on one at a time."""
    free: queue.SimpleQueue[Staged] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(item: Item) -> Out:
        copy = free.get()
        try:
            return do(copy, item)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(one, items))


def _write(result: Result, origin: Mapping[str, object], path: Path = RESULTS) -> None:
    """Write the row of a mutant in the place of its earlier one, and drop those of no mutant."""
    mutant = result.mutant
    row = {"name": mutant.name, "file": mutant.file, "part": result.part, "kind": mutant.kind}
    row |= {"tests": mutant.tests, "outcome": result.outcome, "by": result.by}
    rows: dict[str, dict[str, object]] = {}
    if path.exists():
        rows = {row["name"]: dict(row) for row in tables.read(path)}
    rows[mutant.name] = {**row, "seconds": f"{result.seconds:.1f}", **origin}
    known = [mutant.name for mutants in PARTS.values() for mutant in mutants]
    path.unlink(missing_ok=True)
    tables.append(path, [rows[name] for name in known if name in rows])


def _show(results: Sequence[Result], seconds: float) -> None:
    counts = Counter((result.part, result.outcome) for result in results)
    print(f"\n{'part':<16}{'mutants':>8}" + "".join(f"{o:>10}" for o in OUTCOMES))
    for part in [part for part in PARTS if any(r.part == part for r in results)]:
        row = [counts[part, outcome] for outcome in OUTCOMES]
        print(f"{part:<16}{sum(row):>8}" + "".join(f"{n:>10}" for n in row))
    totals = [sum(counts[part, outcome] for part in PARTS) for outcome in OUTCOMES]
    print(f"{'all':<16}{sum(totals):>8}" + "".join(f"{n:>10}" for n in totals))
    for r in results:
        if r.outcome == "expected":
            print(f"expected to escape: {r.mutant.name}: {r.mutant.escapes}")
        elif r.mutant.escapes and r.outcome in ("caught", "hung"):
            print(f"caught although it has a reason to escape: {r.mutant.name}")
        elif r.bad:
            print(f"{r.outcome}: {r.mutant.name} in {r.mutant.file}, tests {r.mutant.tests}")
    print(f"{len(results)} mutants in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
