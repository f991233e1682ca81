"""Losses of every method on a model, beside those of the float32 run.

    python -m pycomm.bench training --models demo,25m --csv bench/results/training-cpu.csv

The bits of a result do not depend on the link, so losses and times are measured apart: steps are
those of `python -m pycomm.bench step`. Every method trains on two ranks (or others) on a loopback,
once per seed, for a quarter more steps than the learning rate's schedule has; the loss on held-out
text is taken during the training (256 windows), and at the end of the schedule (2048 windows). The
bytes of a step are the mean over the schedule, as pycomm counts them.

    --only optimizer   instead: the time of coded optimizers beside torch's (optimizer.py)
    --suite            instead: losses on tasks of several kinds, of small models (suite.py)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pycomm.bench.common import arguments
from pycomm.bench.common.harness import Row, read_rows
from pycomm.bench.common.report import Column, Report
from pycomm.bench.lab import jobs
from pycomm.bench.lab.base import Lab
from pycomm.bench.lab.rates import UNLIMITED
from pycomm.bench.training import optimizer, suite
from pycomm.bench.training.methods import METHODS, Method
from pycomm.bench.training.results import RANKS, describe
from pycomm.bench.training.tasks import TASKS
from pycomm.bench.training.train import FINAL_WINDOWS, MODELS, parameters, ranks_train
from pycomm.plan.options import count

LOSSES = (
    Column("model", -12),
    Column("ranks", 5),
    Column("seed", 4),
    Column("method", -40),
    Column("loss", 8, ".4f"),
)


def train(ranks: int, function: Callable[..., Any], *values: Any, **options: Any) -> list[Any]:
    """Train on an unlimited loopback; return what rank 0 yields.

    Raises:
        Failed: a rank failed.
    """
    env = {"PYCOMM_TRANSPORT": os.environ.get("PYCOMM_TRANSPORT", "tcp")}  # which counts bytes
    with Lab(ranks, UNLIMITED) as lab:
        return jobs.ask(lab, function, *values, env=env, **options)


def losses(
    model: str, methods: Sequence[Method], seeds: Sequence[int], ranks: int
) -> Iterator[Row]:
    """Train every method with every seed on so many ranks."""
    for seed in seeds:
        for method in methods:
            base = replace(MODELS[model], seed=seed)
            config = replace(base, extra=base.steps // 4)
            print(f"training {method.label}, seed {seed} ...", file=sys.stderr, flush=True)
            rows = train(ranks, ranks_train, config, [method])
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
    add("--ranks", type=arguments.listed(count), default=[RANKS], help=each)
    add("--seeds", type=arguments.counts, default=[0, 1, 2], help="of the trainings")
    arguments.add_csv(parser)
    options = parser.parse(argv)
    unknown = {"losses": ("tasks",), "optimizer": ("methods", "ranks", "seeds", "suite", "tasks")}
    if options.suite:
        parser.refuse(argv, "--suite", "models", "only", "ranks")
    else:
        parser.refuse(argv, f"--only {options.only}", *unknown[options.only])
    known = {method.label: method for method in METHODS}
    names = suite.METHODS if options.suite else known
    labels = arguments.fitting(parser, "--methods", options.methods, names)
    options.methods = labels if options.suite else [known[label] for label in labels]
    options.tasks = arguments.fitting(parser, "--tasks", options.tasks, TASKS)
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.only == "optimizer":
        return optimizer.run(options)
    report = Report(LOSSES, options)
    report.header()
    if options.suite:
        before = read_rows(options.csv, Row) if options.csv and options.csv.is_file() else []
        wanted = suite.missing(before, options.tasks, options.methods, options.seeds)
        if wanted:
            train(2, suite.ranks_train, wanted, heard=lambda got: report.add(suite.row(**got)))
        print(suite.table([*before, *report.rows]))
        return 0
    for model in options.models:
        for ranks in options.ranks:
            for row in losses(model, options.methods, options.seeds, ranks):
                report.add(row)
    return 0
