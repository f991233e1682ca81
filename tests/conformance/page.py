"""Writes docs/conformance.md from results.csv.xz."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.conformance.judged import BOUND_TO_A_NAME, NOT_ON_CPU, Row, read, worse

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"

INTRODUCTION = """\
# Conformance

PyTorch tests its own backends with a suite of 285 tests that ships in the wheel
(`torch/testing/_internal/distributed/distributed_test.py`). `make conformance` runs it against
pycomm and Gloo, and writes this page; `tests/conformance/results.csv.xz` has every test. The part
that runs in a few minutes is in `make test`.

The suite decides by the *name* of the backend which tests run. pycomm and Gloo take Gloo's place
and then NCCL's (on CPU tensors), with the tests that torch keeps for MPI and for eight ranks.
"""


def write_page(rows: list[Row]) -> None:
    """Write the page. `rows` are a full run of both backends."""
    parts = [INTRODUCTION, _table(rows), _bugs(rows), _better(rows), _open(rows)]
    parts += [_other(path, rows) for path in sorted(HERE.glob("results-*.csv.xz"))]
    parts.append(_not_judged())
    PAGE.write_text("\n".join(parts))


def _table(rows: list[Row]) -> str:
    """Return what passed, failed (or timed out) and was skipped, by the place that was taken."""
    counts = Counter((r.like, r.world_size, r.backend, r.status) for r in rows)
    head = "| in the place of | ranks | pycomm passes | fails | Gloo passes | fails | skipped |"
    lines = [head, "| --- " * 7 + "|"]
    for like, ranks in sorted({(r.like, r.world_size) for r in rows}):
        cells = [like, str(ranks)]
        for backend in ("pycomm", "gloo"):
            passed, failed, late = (
                counts[like, ranks, backend, status] for status in ("pass", "fail", "timeout")
            )
            cells += [str(passed), str(failed + late)]
        cells.append(str(counts[like, ranks, "pycomm", "skip"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _bugs(rows: list[Row]) -> str:
    bugs = worse(rows)
    if not bugs:
        return "Every test that Gloo passes, pycomm passes.\n"
    return _list("Gloo passes, pycomm does not", bugs)


def _better(rows: list[Row]) -> str:
    passed = {r.key for r in rows if r.backend == "pycomm" and r.status == "pass"}
    found = {r.test for r in rows if r.backend == "gloo" and r.status != "pass" and r.key in passed}
    return f"pycomm passes {len(found)} tests that Gloo does not.\n"


def _open(rows: list[Row]) -> str:
    failed = [r for r in rows if r.backend == "pycomm" and r.status in ("fail", "timeout")]
    gloo = {r.key for r in rows if r.backend == "gloo" and r.status == "pass"}
    return _list("Neither passes", [r for r in failed if r.key not in gloo])


def _list(title: str, rows: list[Row]) -> str:
    """One line per reason: what a test says there first, and the tests that say so."""
    if not rows:
        return f"## {title}\n\nNone.\n"
    first: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: (r.test, r.world_size)):
        first.setdefault(row.test, row)
    reasons: dict[str, list[str]] = {}
    for test, row in first.items():
        sizes = ", ".join(sorted({str(r.world_size) for r in rows if r.test == test}))
        said = row.reason[:60].replace("|", "/")
        reasons.setdefault(f"{said} | {sizes}", []).append(f"`{test}`")
    lines = [f"## {title}", "", "| says | ranks | tests |", "| --- | --- | --- |"]
    lines += [f"| {reason} | {_names(tests)} |" for reason, tests in reasons.items()]
    return "\n".join(lines) + "\n"


def _names(tests: list[str]) -> str:
    """Return the first of the tests' names, and the number of the others."""
    return tests[0] + (f" and {len(tests) - 1} more" if len(tests) > 1 else "")


def _other(path: Path, known: list[Row]) -> str:
    """Return the section of a run on another torch, `results-VERSION.csv.xz`."""
    rows = read(path)
    version = path.name.removeprefix("results-").removesuffix(".csv.xz")
    parts = [f"## On torch {version}", "", _table(rows)]
    bugs = worse(rows)
    parts.append(_list("Gloo passes, pycomm does not", bugs).replace("## ", "### ", 1))
    named = {r.test for r in bugs} | {r.test for r in known if r.status in ("fail", "timeout")}
    failed = [r for r in rows if r.backend == "pycomm" and r.status in ("fail", "timeout")]
    more = [row for row in failed if row.test not in named]
    parts.append(_list("Neither passes, besides those above", more).replace("## ", "### ", 1))
    return "\n".join(parts)


def _not_judged() -> str:
    lines = ["## Not judged", ""]
    lines += [f"* {why}: {_names([f'`{t}`' for t in ts])}" for why, ts in NOT_ON_CPU.items()]
    lines += [f"* `{test}`: {why}" for test, why in BOUND_TO_A_NAME.items()]
    return "\n".join(lines) + "\n"
