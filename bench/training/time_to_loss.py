"""Losses of every method on a model, beside those of the float32 run.

    python -m pycomm.bench training --models demo,25m --csv bench/results/training-cpu.csv

The bits of a result do not depend on the link, so losses and times are measured apart: steps are
those of `python -m pycomm.bench step`. Every method trains on two ranks (or others) on a loopback,
once per seed, for a quarter more steps than the learning rate's schedule has; the loss on held-out
text is taken during the training (256 windows), and at the end of the schedule (2048 windows). The
bytes of a step are the mean over the schedule, as pycomm counts them.

The time to the loss is the number of steps after which a method's loss, averaged over seeds, has
come down to the float32 run's loss at the end of its schedule, times the method's median step, of
which the CSV has the rows.

    --only optimizer   instead: the time of CodedAdamW beside torch's fused AdamW (optimizer.py)
    --suite            instead: losses on tasks of several kinds, of small models (suite.py)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pycomm.arguments import guess
from pycomm.bench import netlab
from pycomm.bench.common import arguments, tables
from pycomm.bench.common.harness import Origin, Row, record, write_json
from pycomm.bench.lab import jobs
from pycomm.bench.training import optimizer, suite
from pycomm.bench.training.methods import METHODS, Method
from pycomm.bench.training.results import RANKS, describe, load, show, totals
from pycomm.bench.training.tasks import TASKS
from pycomm.bench.training.train import FINAL_WINDOWS, MODELS, Config, parameters

# -------------------------------------------------------------------- losses


def train(config: Config, method: Method, ranks: int) -> list[dict[str, float]]:
    """Train on an unlimited loopback; return rank 0's rows.

    Raises:
        Failed: a rank failed.
    """
    arguments = asdict(config) | {"method": method.label}
    os.environ.setdefault("PYCOMM_TRANSPORT", "tcp")  # which counts what travels
    command = [sys.executable, "-m", "pycomm.bench.training.train"]
    for name, value in arguments.items():
        command += [f"--{name.replace('_', '-')}={value}"]
    with tempfile.TemporaryDirectory() as folder, netlab.Paced(ranks, netlab.UNLIMITED) as lab:
        lab.timed = False  # losses do not depend on it
        log = Path(folder, "log")
        print(f"training {method.label}, seed {config.seed} ...", file=sys.stderr, flush=True)
        jobs.run(lab, [*command, f"--log={log}"])
        return [json.loads(line) for line in log.read_text().splitlines()]


def losses(
    model: str, methods: Sequence[Method], seeds: Sequence[int], ranks: int
) -> Iterable[Row]:
    """Train every method with every seed on so many ranks."""
    for seed in seeds:
        for method in methods:
            base = replace(MODELS[model], seed=seed)
            config = replace(base, extra=base.steps // 4)
            rows = train(config, method, ranks)
            end = next(row for row in rows if "final" in row)
            curve = {int(r["step"]): r["held_out"] for r in rows if "step" in r and "held_out" in r}
            yield replace(
                describe("loss", model, parameters(MODELS[model]), method, ranks),
                seed=seed,
                steps=base.steps,
                windows=FINAL_WINDOWS,
                loss=end["final"],
                wire_bytes=end["mean_wire_bytes"] or None,  # only pycomm counts on a loopback
                curve=" ".join(f"{step}:{loss:.6f}" for step, loss in curve.items()),
            )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench training", description=__doc__)
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--models", type=arguments.some_of("model", MODELS), default="demo", help=f"of {known}")
    add("--methods", default="", help="only those in whose label this pattern is found")
    add("--only", choices=("losses", "optimizer"), default="losses", help="(losses)")
    add("--suite", action="store_true", help="losses on small tasks of several kinds")
    add("--tasks", default="", help="of the suite: those in whose name this pattern is found")
    each = "of the trainings; each rank has a batch of its own"
    add("--ranks", type=arguments.counts, default=[RANKS], help=each)
    add("--seeds", type=arguments.counts, default=[0, 1, 2], help="of the trainings")
    arguments.add_files(parser)
    options = parser.parse_args(argv)
    if 0 in options.ranks:
        parser.error("--ranks 0 starts nothing: want at least 1")
    known = {method.label: method for method in METHODS}
    labels = _found(parser, "--methods", options.methods, suite.METHODS if options.suite else known)
    options.methods = labels if options.suite else [known[label] for label in labels]
    options.tasks = _found(parser, "--tasks", options.tasks, TASKS)
    return options


def _found(
    parser: argparse.ArgumentParser, option: str, pattern: str, names: Iterable[str]
) -> list[str]:
    """Return the names in which a pattern is found."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        parser.error(f"{option} {pattern!r} is no pattern: {error}")
    if not found:
        meant = guess(pattern, list(names))
        parser.error(f"{option} {pattern!r} fits none of these: {meant}{'; '.join(names)}")
    return found


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    methods = options.methods
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench", "training", *argv]))
    csv_path = Path(options.csv) if options.csv else None
    if options.only == "optimizer":
        return optimizer.run({name: MODELS[name] for name in options.models}, origin, csv_path)
    try:
        rows = load(csv_path) if csv_path and csv_path.exists() else []
    except (KeyError, TypeError, ValueError) as error:
        print(
            f"python -m pycomm.bench training: --csv {csv_path} holds no rows of this benchmark: "
            f"{error}",
            file=sys.stderr,
        )
        return 2
    records: list[dict[str, Any]] = []

    def keep(row: Row) -> None:
        rows.append(row)
        what = f"{row.model} {row.ranks} ranks, seed {row.seed}, {row.method}"
        print(f"{what}: loss {row.loss:.4f}", flush=True)
        records.append(record(row, origin))
        if csv_path:
            tables.append(csv_path, records[-1:])

    if options.suite:
        wanted = suite.missing(rows, options.tasks, methods, options.seeds)
        if wanted:
            suite.measure(wanted, keep)
        for line in suite.table(rows):
            print(" | ".join(line))
    else:
        for model in options.models:
            for ranks in options.ranks:
                for row in losses(model, methods, options.seeds, ranks):
                    keep(row)
        show(totals(rows))
    if options.json:
        write_json(Path(options.json), records)
    return 0
