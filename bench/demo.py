"""`make demo`: trains a real model over a slow link, with Gloo and with pycomm, side by side.

    python -m pycomm.bench.demo

Two ranks with one torch thread each, on a GPU where torch sees one and else on the CPU, run the
same training (training/train.py) over a link of 200 Mbit/s (netlab.py) once per row, with the same
weights, data and steps. The rows take turns, ten steps each. The results are printed as a table and
drawn as a picture of the loss against wall time.
A speed-up that means nothing is held back.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycomm.bench import netlab
from pycomm.bench.__main__ import reported
from pycomm.bench.common import accelerator, tables
from pycomm.bench.common.arguments import Parser
from pycomm.bench.common.harness import Origin
from pycomm.bench.figures import charts
from pycomm.bench.figures.drawing import save
from pycomm.bench.lab import jobs, rates
from pycomm.bench.training.methods import Method
from pycomm.bench.training.results import demo_table
from pycomm.bench.training.train import Config, parameters, ranks_train
from pycomm.plan import show
from pycomm.plan.options import count, shown
from pycomm.units import format_rate, parse_rate

FEWEST = 4
"""Turns that a spread takes."""
COLUMNS = ("run", "backend", "codec", "rate", "connection", "parameters", "steps")
COLUMNS += ("step_seconds", "wire_bytes", "loss", "curve")


@dataclass
class DemoRun:
    """One training run: its settings, which differ between rows, and its results."""

    label: str
    backend: str
    codec: str | None = None
    seconds: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return float(self.result["step_seconds"])

    @property
    def loss(self) -> float:
        return float(self.result["held_out"])


def runs(with_gloo: bool, *, cuda: bool = False) -> list[DemoRun]:
    rows = [
        DemoRun("NCCL, float32", "nccl") if cuda else DemoRun("Gloo, float32", "gloo"),
        DemoRun("pycomm, float32", "pycomm"),
        DemoRun("pycomm, int8 + feedback", "pycomm", "int8"),
        DemoRun("pycomm, int4 + feedback", "pycomm", "int4"),
    ]
    return rows if with_gloo else rows[1:]


def hear(done: list[DemoRun], steps: int, row: dict[str, Any]) -> None:
    """Take a record of rank 0; print one at each quarter of the steps."""
    run = done[row["turn"]]
    if "step_seconds" in row:
        run.result = row
    if "held_out" in row and "step" in row:
        run.seconds.append(row["seconds"])
        run.held_out.append(row["held_out"])
        if row["step"] % max(1, steps // 4) == 0:
            speed = row["seconds"] / row["step"] * 1e3
            what = f"loss {row['loss']:.2f}, {speed:.0f} ms a step"
            print(f"{run.label:<24} {row['step']}/{steps} steps, {what}", flush=True)


def means_nothing(run: DemoRun, done: list[DemoRun]) -> str:
    """Return why the speed-up of a run means nothing; "" if it means something."""
    if run is done[0]:
        return ""
    # Of the turns after the first.
    theirs, ours = ([b - a for a, b in pairwise(one.seconds[1:])] for one in (done[0], run))
    gains = [a / b for a, b in zip(theirs, ours, strict=True)]
    if len(gains) < FEWEST:
        return f"the run was too short; take at least {10 * (FEWEST + 2)} steps"
    low, _, high = statistics.quantiles(gains, n=4)
    if low <= 1 <= high:
        return f"turns differ by more than it: half of them were {low:.2f} to {high:.2f} x"
    return ""


def verdict(done: list[DemoRun]) -> list[str]:
    """Return a summary of the numbers in words."""
    exact = [run for run in done if not run.codec]
    best, first = done[-1], done[0]
    change = (best.loss / exact[0].loss - 1) * 100
    lines = []
    why = {run.label: means_nothing(run, done) for run in done}
    for reason in dict.fromkeys(filter(None, why.values())):
        names = ", ".join(label for label, given in why.items() if given == reason)
        lines.append(f"The speed-up of {names} is held back: {reason}.")
    gain = first.step_seconds / best.step_seconds
    faster = "" if why[best.label] else f"{gain:.1f} times faster per step than {first.label}; "
    lines.append(f"{best.label}: {faster}its held-out loss is {change:+.2f} % of float32's.")
    if len(exact) > 1:
        same = all(run.held_out == exact[0].held_out for run in exact)
        lines.append(
            "The exact runs have equal losses, to the last bit."
            if same
            else "The exact runs differ in their losses: they should be equal."
        )
    return lines


def records(
    done: list[DemoRun], lab: netlab.Lab, config: Config, origin: Origin
) -> list[dict[str, Any]]:
    """Return a row per run for a result table; `curve` is "seconds:loss" of every evaluation."""
    link = lab.rate, lab.describe(), parameters(config), config.steps
    rows = []
    for run in done:
        places = zip(run.seconds, run.held_out, strict=True)
        curve = " ".join(f"{seconds:.4f}:{loss:.6f}" for seconds, loss in places)
        found = run.step_seconds, run.result["wire_bytes"], run.loss, curve
        values = (run.label, run.backend, run.codec or "none", *link, *found)
        rows.append(dict(zip(COLUMNS, values, strict=True)) | vars(origin))
    return rows


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench.demo", description=__doc__)
    one = shown(lambda text: rates.parse(text) and parse_rate(text) and text)
    parser.add_argument("--rate", type=one, default="200mbit", help="of the link, as tc writes it")
    parser.add_argument("--steps", type=count, default=Config.steps)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for pictures")
    parser.add_argument("--csv", type=Path, help="append the table to this file, too")
    args = parser.parse(argv)
    import_module("matplotlib")  # which draws at the end
    origin = Origin.here(args.command)
    cuda = bool(accelerator.kind())
    origin = replace(origin, device=accelerator.describe() if cuda else origin.device)
    if args.csv:  # whether it takes rows, before they are measured
        tables.header(args.csv, [*COLUMNS, *vars(origin)])
    config = Config(steps=args.steps)

    lab, reason = netlab.open_lab(2, args.rate)
    done = runs(with_gloo=not reason, cuda=cuda)
    methods = [Method("", run.backend, run.codec or "") for run in done]
    with lab:
        print(f"link: {lab.describe()}", flush=True)
        if reason:
            print(f"no namespaces: {reason}")
            print("Gloo is left out: it cannot be slowed down without them", flush=True)
        jobs.ask(
            lab,
            ranks_train,
            *(config, methods, accelerator.kind() if cuda else "cpu"),
            env={"NCCL_SOCKET_IFNAME": lab.interface},
            heard=partial(hear, done, config.steps),
        )
    made = records(done, lab, config, origin)
    head, *body = demo_table(made, [run.label for run in done if means_nothing(run, done)])
    link = format_rate(parse_rate(args.rate)[0])
    show.table(head, body, f"2 ranks on {origin.device}, {link}, {config.steps} steps", words=1)
    for line in verdict(done):
        print(line)

    table = args.out / "demo.csv"
    tables.write(table, list(made[0]), made)
    picture = args.out / "loss.png"
    save(charts.loss(tables.read(table)), picture)
    print(f"files: {table.resolve()}\n       {picture.resolve()}")
    if args.csv:
        tables.append(args.csv, made)
    return 0


if __name__ == "__main__":
    sys.exit(reported(partial(main, sys.argv[1:])))
