"""Tables of docs and README that are written from bench/results: `report --tables`.

A table lies between two comments that name it; the rest of the page is not touched.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Row, read_rows
from pycomm.bench.common.report import markdown
from pycomm.bench.peers import table as peers
from pycomm.bench.plan import command as plan
from pycomm.bench.training import suite
from pycomm.bench.training.methods import METHODS
from pycomm.bench.training.results import (
    DEMO_HEAD,
    RANKS,
    changes,
    demo_cells,
    load,
    with_loss,
)
from pycomm.codecs import CODECS as KNOWN
from pycomm.reduction.paths import KINDS, PATHS

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGE = DOCS / "results.md"
TRAINING, CODECS = tables.RESULTS / "training-cpu.csv", tables.RESULTS / "codecs-cpu.csv"
DEMO = tables.RESULTS / "demo-cpu.csv"
COUNTS = ROOT / "tests" / "codecs" / "cuda" / "calls.csv"


def steps(rows: Sequence[Row], model: str, rate: str) -> str:
    """Return the table with a row per method, the fastest step first; the last rows count."""
    found = {r.method: r for r in rows if (r.kind, r.model, r.rate) == ("step", model, rate)}
    chosen = sorted((r for r in found.values() if r.seconds), key=lambda r: r.seconds or 0)
    fp16 = next((r.seconds for r in chosen if r.hook == "fp16"), None)
    lines = [
        [
            row.method,
            number(row.seconds, 0, 1e3),
            number(row.wire_bytes, 2, 1e-6),
            number(fp16 / row.seconds if fp16 and row.seconds else None, 2),
        ]
        for row in chosen
    ]
    return markdown(("method", "step, ms", "MB a step", "x fp16 hook"), lines)


def losses(rows: Sequence[Row], model: str) -> str:
    """Return the table with a row per method: its loss against the exact run, over the seeds."""
    found = [r for r in rows if (r.kind, r.model, r.ranks) == ("loss", model, RANKS)]
    known = {method.label for method in METHODS}  # rows of others stay for pages that date them
    found = [r for r in found if r.method in known]
    lines = []
    for method in dict.fromkeys(r.method for r in found):
        whole = with_loss(next(r for r in found if r.method == method), rows)
        by_seed = changes(method, model, rows)
        lines.append([
            method, str(len(by_seed)), percent(by_seed), number(whole.steps_to_loss, 0)
        ])  # fmt: skip
    return markdown(("method", "seeds", "loss, %", "steps to the exact loss"), lines)


def percent(values: Sequence[float]) -> str:
    """Return the mean in percent, with its standard error if there are at least two values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values) * 100:+.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5 * 100:.2f}"


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"


def codecs(path: Path) -> str:
    """Return the table with a row per codec: bits per value, error, and GB/s on one core."""
    found: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in tables.read(path):
        if (row["kind"], row["backend"]) == ("codec", "native"):
            found.setdefault(row["codec"], {}).setdefault(row["op"], []).append(row)
    lines = []
    for codec, ops in found.items():
        largest = {op: max(rows, key=lambda r: int(r["size"])) for op, rows in ops.items()}
        some = next(iter(largest.values()))
        errors = [float(r["err"]) for r in largest.values() if r["err"]]
        lines.append([
            f"`{codec}`",
            f"{32 / float(some['ratio']):.2f}" if some["ratio"] else "",
            f"{statistics.fmean(errors) ** 2:.2g}" if errors else "",
            *(f"{float(largest[op]['algbw']):.1f}" if op in largest else "" for op in OPS),
        ])  # fmt: skip
    head = ("codec", "bits", "squared error", *(op.replace("_", " ") for op in OPS))
    return markdown(head, lines)


def demo(path: Path) -> str:
    """Return the table with a row per run of the demo."""
    rows = tables.newest(tables.read(path), "run")
    first = float(rows[0]["step_seconds"])
    numbers = [[float(row[c]) for c in ("step_seconds", "wire_bytes", "loss")] for row in rows]
    return markdown(DEMO_HEAD, [
        demo_cells(row["run"], step, first, sent, loss)
        for row, (step, sent, loss) in zip(rows, numbers, strict=True)
    ])  # fmt: skip


def planner(path: Path) -> str:
    """Return the planner's prediction errors over all cases."""
    cases = read_rows(path, plan.PlanCase)
    median, worst, picked = plan.accuracy(cases)
    cells = [str(len(cases)), f"{median:.1%}", f"{worst:.1%}", f"{sum(picked)} of {len(picked)}"]
    return markdown(("cases", "median error", "worst", "fastest codec picked"), [cells], left=0)


OPS = ("encode", "encode+residual", "decode", "decode_add")


def write(page: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- name -->` and `<!-- end -->`.

    Raises:
        ValueError: the page has no such comments.
    """
    marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    old = page.read_text()
    if not marks.search(old):
        raise ValueError(f"{page} has no place for the table {name!r}")
    # At once, so that a run that is stopped leaves the old page or the new one.
    partial = page.with_suffix(".partial")
    partial.write_text(marks.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old))
    partial.replace(page)


def kernels(counts: Path) -> str:
    """Return the table with a row per codec: what its calls on a GPU can reach of a copy's speed.

    A call that takes `allowed` instructions for a value leaves time for `share` of that speed.

    Args:
        counts: calls.csv of tests/codecs/cuda.
    """
    found: dict[str, dict[str, str]] = {}
    for row in tables.read(counts):
        codec = re.sub(r",? (encode|own|decode)\b.*", "", row["call"])
        call = row["call"][len(codec) :].lstrip(", ").removesuffix(", one payload")
        reached = float(row["share"]) * float(row["allowed"]) / float(row["sm_90"])
        found.setdefault(codec, {})[call] = f"{min(1.0, reached):.0%}"
    calls = ("encode", "encode, feedback", "own", "decode")
    lines = [[name, *(of.get(call, "") for call in calls)] for name, of in found.items()]
    return markdown(("codec", *calls), [line for line in lines if any(line[1:])])


def claims(claimed: Sequence[tables.Row], results: Path) -> str:
    """Return the table with a row per claim: its command, and where it was measured last."""
    lines = []
    for claim in claimed:
        last = max(tables.read(results / claim["table"]), key=lambda row: row["time"])
        lines.append([
            claim["claim"],
            f"`{claim['command']}`",
            f"`{claim['table']}`",
            f"{last['time'][:10]}, {last['commit']}",
        ])  # fmt: skip
    return markdown(("claim", "command", "rows", "newest"), lines, left=4)


def paths() -> str:
    """Return the table with a row per path of compressed collectives: what it takes."""

    def names(taken: Sequence[str] | None, known: Sequence[str]) -> str:
        return "all" if taken is None or set(taken) == set(known) else ", ".join(sorted(taken))

    places = {"cpu": "CPU", "gpu": "GPU", "any": "CPU, GPU"}
    lines = []
    for path in PATHS:
        coded, kinds = names(path.codecs, tuple(KNOWN)), names(path.kinds, KINDS)
        lines.append([f"`{path.name}`", places[path.on], path.about, coded, kinds])
    return markdown(("path", "values on", "what it does", "codecs", "feedback"), lines, left=5)


def write_all(claimed: Sequence[tables.Row]) -> None:
    """Write all tables; those of what docs claim has a row for each of these claims."""
    rows = load(TRAINING)
    for rate in dict.fromkeys(r.rate for r in rows if (r.kind, r.model) == ("step", "25m")):
        write(PAGE, f"steps 25m {rate}", steps(rows, "25m", rate))  # a figure has the demo's
    write(PAGE, "losses demo", losses(rows, "demo"))  # others are sweeps of the demo's settings
    # A row per method, since there are more of them than of tasks.
    tasks, *lines = zip(*suite.table(load(tables.RESULTS / "suite-cpu.csv")), strict=True)
    methods = [line for line in lines if any(line[1:])]
    write(PAGE, "suite", markdown(("method", *tasks[1:]), methods))
    write(PAGE, "codecs", codecs(CODECS))
    write(DOCS / "bench.md", "claims", claims(claimed, tables.RESULTS))
    write(DOCS / "peers.md", "peers", peers.markdown(tables.read(tables.RESULTS / "peers-cpu.csv")))
    write(PAGE, "planner", planner(tables.RESULTS / "plan-cpu.csv"))
    write(PAGE, "kernels", kernels(COUNTS))
    write(DOCS / "gpu.md", "paths", paths())
    write(README, "demo", demo(DEMO))
