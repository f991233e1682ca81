"""Tables of docs and README that are written from bench/results: `report --tables`.

A table lies between two comments that name it; the rest of the page is not touched.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pycomm
from pycomm.bench import peers, plan
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Row, format_size, read_rows
from pycomm.bench.common.report import markdown
from pycomm.bench.training import suite
from pycomm.bench.training.methods import METHODS
from pycomm.bench.training.results import (
    RANKS,
    changes,
    demo_table,
    loss,
    pairs,
    steps_to_exact,
)
from pycomm.codecs import CODECS as KNOWN
from pycomm.codecs import short_text
from pycomm.reduction.paths import KINDS, PATHS

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGE = DOCS / "results.md"


def results(name: str) -> list[Row]:
    """Return the rows of a table in bench/results."""
    return read_rows(tables.RESULTS / f"{name}.csv", Row)


def steps(rows: Sequence[Row], model: str) -> str:
    """Return the table with a row per method: its step on each link; the last rows count."""
    found = {
        (r.rate, r.method): r
        for r in rows
        if (r.kind, r.model) == ("step", model) and r.seconds is not None
    }
    rates = list(dict.fromkeys(rate for rate, _ in found))
    lines = []
    for method in dict.fromkeys(method for _, method in found):
        of = [found.get((rate, method)) for rate in rates]
        sent = next(row.wire_bytes for row in of if row)
        times = (number(row and row.seconds, 0, 1e3) for row in of)
        lines.append([label(method), number(sent, 2, 1e-6), *times])
    # The fastest on the last link first.
    lines.sort(key=lambda line: float(line[-1] or "inf"))
    return markdown(("method", "MB a step", *(f"{rate}, ms" for rate in rates)), lines)


def steps_by_link(rows: Sequence[Row]) -> str:
    """Return the table with a row per link: milliseconds of a step of the demo's model."""
    found = {(r.rate, r.method): r.seconds for r in rows}
    lines = [
        [rate, *(number(found[rate, method], 0, 1e3) for method in BY_LINK)]
        for rate in dict.fromkeys(rate for rate, _ in found)
    ]
    return markdown(("link", *map(label, BY_LINK)), lines)


def modelled(rows: Sequence[Row]) -> str:
    """Return the table with a row per method: its modelled step on each link, and the bound."""
    found = {(r.codec, r.rate): r for r in rows}
    codecs, rates = (list(dict.fromkeys(one)) for one in zip(*found, strict=True))
    lines = [
        [codec, *(f"{number(r.seconds, 0, 1e3)} ({number(r.bound, 0, 1e3)})" for r in of)]
        for codec in codecs
        for of in [[found[codec, rate] for rate in rates]]
    ]
    return markdown(("method", *(f"{rate}, ms (bound)" for rate in rates)), lines)


def losses(rows: Sequence[Row], model: str) -> str:
    """Return the table with a row per method: its loss against the exact run, over the seeds."""
    found = [r for r in rows if (r.kind, r.model, r.ranks) == ("loss", model, RANKS)]
    known = {method.label for method in METHODS}  # rows of others stay for pages that date them
    found = [r for r in found if r.method in known]
    lines = []
    for method in dict.fromkeys(r.method for r in found):
        by_seed = changes(method, model, rows)
        steps = steps_to_exact(method, model, rows) if by_seed else None
        lines.append([label(method), percent(by_seed), number(steps, 0)])
    return markdown(("method", "loss, %", "steps"), lines)


def longer_losses(rows: Sequence[Row]) -> str:
    """Return the table of coded momentum on more ranks, and in more steps."""
    codecs = ("sign", "top-k 1 %")
    trainings = {
        "four ranks": ("demo", 4),
        "eight ranks": ("demo", 8),
        "two ranks, 2,000 steps": ("demo-2000", RANKS),
    }
    lines = [
        [
            name,
            *(percent(changes(f"pycomm, coded momentum, {c}", model, rows, ranks)) for c in codecs),
        ]
        for name, (model, ranks) in trainings.items()
    ]
    return markdown(("coded momentum, %", *codecs), lines)


def local_losses(rows: Sequence[Row]) -> str:
    """Return the table with a row per form of LocalSGD: its bytes, and its loss beside float32."""
    exact = "LocalSGD, fp32"
    lines = []
    for method in dict.fromkeys(r.method for r in rows):
        trained = pairs(method, "demo", rows, exact=exact)
        sent = number(trained[-1][0].wire_bytes, 1, 1e-3)
        change = [loss(mine) / loss(theirs) - 1 for mine, theirs in trained]
        lines.append([method, sent, "" if method == exact else percent(change)])
    return markdown(("form", "kB a step", "loss, %"), lines)


def far_links(path: Path) -> str:
    """Return the table with a row per far link: the newest rates of pycomm, Gloo and iperf3.

    The stream of iperf3 is the one of the run that has measured the all-reduce.
    """
    keys = ("round_trip_ms", "loss", "operation", "bytes", "backend")
    rows = [row for row in tables.read(path) if row["rate"] == "200mbit"]
    found = {tuple(row[k] for k in keys): row for row in tables.newest(rows, *keys)}
    streams = {(r["round_trip_ms"], r["loss"], r["commit"]): r for r in rows if r["how"]}
    lines = []
    for link in itertools.product(("30", "100", "200"), ("0", "1%")):
        large, small = (
            [found.get((*link, op, size, backend), {}) for op in ops for backend in BACKENDS]
            for ops, size in ((FAR, "16777216"), (FAR[:1], "8192"))
        )
        stream = streams.get((*link, large[0].get("commit")), {})
        rates = [row.get("mbit_per_s") for row in (stream, *large)]
        cells = [*rates, *(row.get("ms") for row in small)]
        shown = [number(float(cell) if cell else None, 0) for cell in cells]
        lines.append([f"{link[0]} ms, {link[1]}", *shown])
    head = [name for op in FAR for name in (op, "Gloo")]
    return markdown(("round trip, loss", "iperf3", *head, "8 KiB, ms", "Gloo"), lines)


def all_reduces(path: Path) -> str:
    """Return the table with a row per size: microseconds of two ranks' all-reduces, by backend."""
    wanted = {"kind": "time", "op": "all_reduce", "ranks": "2", "codec": "none"}
    rows = [row for row in tables.read(path) if wanted.items() <= row.items()]
    found = {(r["size"], r["backend"]): r for r in tables.newest(rows, "size", "backend")}
    lines = [
        [format_size(size), *(number(float(found[str(size), b]["time_p50"]), 1) for b in NEAR)]
        for size in SIZES
    ]
    return markdown(("size", *NEAR), lines)


def label(method: str) -> str:
    """Return what a table calls a method: the backend is pycomm unless it is named."""
    return method.removeprefix("pycomm, ")


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
    for row in tables.newest(tables.read(path), "kind", "backend", "codec", "op", "size"):
        if (row["kind"], row["backend"]) == ("codec", "native"):
            found.setdefault(row["codec"], {}).setdefault(row["op"], []).append(row)
    lines = []
    for codec, ops in found.items():
        if (short := short_text(pycomm.codec(codec))) in LEFT_OUT:
            continue
        largest = {op: max(rows, key=lambda r: int(r["size"])) for op, rows in ops.items()}
        some = next(iter(largest.values()))
        errors = [float(r["err"]) for r in largest.values() if r["err"]]
        lines.append([
            f"`{short}`",
            f"{32 / float(some['ratio']):.2f}" if some["ratio"] else "",
            f"{statistics.fmean(errors) ** 2:.2g}" if errors else "",
            *(f"{float(largest[op]['algbw']):.1f}" if op in largest else "" for op in OPS),
        ])  # fmt: skip
    head = ("codec", "bits", "squared error", *(op.replace("_", " ") for op in OPS))
    return markdown(head, lines)


def demo(path: Path) -> str:
    """Return the table with a row per run of the demo."""
    rows = tables.newest(tables.read(path), "run")
    head, *body = demo_table(rows)
    return markdown(head, body)


def planner(path: Path) -> str:
    """Return the planner's prediction errors over all cases."""
    cases = read_rows(path, plan.PlanCase)
    median, worst, picked = plan.accuracy(cases)
    cells = [str(len(cases)), f"{median:.1%}", f"{worst:.1%}", f"{sum(picked)} of {len(picked)}"]
    return markdown(("cases", "median error", "worst", "fastest codec picked"), [cells], left=0)


NEAR, SIZES = ("pycomm", "pycomm-shared", "gloo"), (8, 256 << 10, 64 << 20)
BY_LINK = ("Gloo, fp32", "pycomm, int8", "pycomm, int4", "pycomm, EDEN 1 bit")
FAR, BACKENDS = ("all_reduce", "broadcast", "all_gather"), ("pycomm", "gloo")
OPS = ("encode", "encode+residual", "decode")
LEFT_OUT = {
    *("fp32", "fp8_e5m2", "int7", "int5", "int3"),
    *("mxfp8_e5m2", "mxfp6_e3m2", "mxfp4:scale=ceil", "int8:rounding=stochastic"),
}
"""Codecs that differ little from their neighbours in the table."""


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


def claims(claimed: Sequence[tables.Row]) -> str:
    """Return the table with a row per claim: its command, and the table of its rows."""
    lines = [[claim["claim"], f"`{claim['command']}`", f"`{claim['table']}`"] for claim in claimed]
    return markdown(("claim", "command", "table"), lines, left=3)


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
    rows = results("training-cpu")
    write(PAGE, "steps 25m", steps(rows, "25m"))
    write(PAGE, "steps demo", steps_by_link(results("steps-cpu")))
    write(PAGE, "all-reduces", all_reduces(tables.RESULTS / "collectives-cpu.csv"))
    write(PAGE, "losses demo", losses(rows, "demo"))  # others are sweeps of the demo's settings
    write(PAGE, "losses SGD", losses(results("sgd-cpu"), "demo"))
    write(PAGE, "losses longer", longer_losses(rows))
    write(PAGE, "losses local", local_losses(results("local-sgd-cpu")))
    write(PAGE, "far links", far_links(tables.RESULTS / "links-cpu.csv"))
    write(PAGE, "suite", suite.table(results("suite-cpu")))
    write(PAGE, "codecs", codecs(tables.RESULTS / "codecs-cpu.csv"))
    write(DOCS / "bench.md", "claims", claims(claimed))
    write(DOCS / "peers.md", "peers", peers.markdown(tables.read(tables.RESULTS / "peers-cpu.csv")))
    write(PAGE, "planner", planner(tables.RESULTS / "plan-cpu.csv"))
    write(DOCS / "gpu.md", "paths", paths())
    write(DOCS / "gpu.md", "stand-in", modelled(results("step-stand-in")))
    write(README, "demo", demo(tables.RESULTS / "demo-cpu.csv"))
