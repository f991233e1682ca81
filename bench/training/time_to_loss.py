"""Time to the loss of the float32 run, for every method, model and link rate.

    python -m pycomm.bench training --models demo,25m --csv bench/results/training-cpu.csv

The bits of a result do not depend on the link, so losses and times are measured apart (`--only`):

    losses  every method trains on two ranks (or others) on a loopback, once per seed, for a quarter
            more steps than the learning rate's schedule has; the loss on held-out text is taken
            during the training (256 windows), and at the end of the schedule (2048 windows). The
            bytes of a step are the mean over the schedule, as pycomm counts them
    steps   two ranks on a real link (netlab.py) take steps with one method after the other, in one
            set of processes, repeatedly; the median counts, and of LocalSGD the mean over rounds

The time to the loss is the number of steps after which a method's loss, averaged over seeds, has
come down to the float32 run's loss at the end of its schedule, times the method's median step.

    optimizer   instead: the time of CodedAdamW beside torch's fused AdamW (optimizer.py)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.arguments import guess
from pycomm.bench import netlab
from pycomm.bench.common import arguments, tables
from pycomm.bench.common.harness import Origin, Row, record, write_json
from pycomm.bench.common.timing import in_turns
from pycomm.bench.lab import jobs
from pycomm.bench.training import optimizer
from pycomm.bench.training.corpora import CORPORA
from pycomm.bench.training.methods import METHODS, Method
from pycomm.bench.training.results import RANKS, load, show, totals
from pycomm.bench.training.train import (
    FINAL_WINDOWS,
    Config,
    Transformer,
    batches,
    loss_of,
    wire_bytes,
)

MODELS = {
    "demo": Config(),
    "demo-beta0": Config(beta1=0.0),  # feedback delays gradients, which conflicts with momentum
    "demo-1e-3": Config(learning_rate=1e-3),  # the sweep of learning rates
    "demo-3e-3": Config(learning_rate=3e-3),
    "demo-4e-3": Config(learning_rate=4e-3),
    "demo-beta.5": Config(beta1=0.5),
    "demo-2000": Config(steps=2000, evaluate_every=100, warmup=100),
    "digits": Config(corpus="digits", context=64, batch=8),
    "25m": Config(layers=8, width=512, heads=8, batch=4, steps=160, learning_rate=6e-4),
}
SETTLE = 3  # untimed steps after a change of the method: DDP makes new buckets


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
                describe("loss", model, method, ranks),
                seed=seed,
                steps=base.steps,
                windows=FINAL_WINDOWS,
                loss=end["final"],
                wire_bytes=end["mean_wire_bytes"] or None,  # only pycomm counts on a loopback
                curve=" ".join(f"{step}:{loss:.6f}" for step, loss in curve.items()),
            )


# --------------------------------------------------------------------- steps


def step_times(
    model: str, methods: Sequence[Method], rate: str, options: argparse.Namespace
) -> Iterable[Row]:
    """Time the steps of all methods on a link, in turns."""
    lab, reason = netlab.open_lab(RANKS, rate)
    if reason:
        raise RuntimeError(f"this needs network namespaces: {reason}")
    with lab:
        print(f"timing steps of {len(methods)} methods at {rate} ...", file=sys.stderr, flush=True)
        samples = jobs.ask(
            lab,
            "pycomm.bench.training.time_to_loss",
            model=model,
            methods=[method.label for method in methods],
            rounds=options.rounds,
            turn_seconds=options.turn_seconds,
            compute=options.compute,
        )
        connection = f"tcp ({lab.congestion})"
    for method in methods:
        mine = [s for s in samples if s["method"] == method.label]
        seconds = [s for sample in mine for s in sample["seconds"]]
        middle = statistics.fmean(seconds) if method.local else statistics.median(seconds)
        yield replace(
            describe("step", model, method),
            rate=rate,
            connection=connection,
            steps=len(seconds),
            seconds=middle,
            ratio=options.compute / middle if options.compute else None,
            wire_bytes=statistics.median(sample["wire_bytes"] for sample in mine),
        )


def time_on_this_rank(
    model: str,
    methods: list[str],
    rounds: int,
    turn_seconds: float,
    compute: float,
    log: str,
    folder: str,
) -> None:
    """Time methods in turns; rank 0 writes the samples. Most share one model and one optimizer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": None, "pycomm": dist.new_group(backend="pycomm")}
    config = MODELS[model]
    torch.manual_seed(0)
    net = Transformer(config)
    adamw = torch.optim.AdamW(net.parameters(), config.learning_rate)
    data = batches(CORPORA[config.corpus]()[0], config, dist.get_rank(), RANKS)
    for label in methods * rounds:
        method = next(m for m in METHODS if m.label == label)
        group = groups[method.backend]
        bare = Transformer(config) if method.own_model else net
        wrapped = method.wrap(bare, group, sync=False)
        chosen, finish = adamw, None
        if method.momentum or method.sgd or method.own_model:
            given = config.learning_rate, (0.9, 0.999)
            chosen, finish = method.optimizer(wrapped, *given, group)

        def step(model: nn.Module = wrapped, by: torch.optim.Optimizer = chosen) -> None:
            until = time.perf_counter() + compute
            loss_of(model, next(data)).backward()
            time.sleep(max(0.0, until - time.perf_counter()))
            by.step()
            by.zero_grad()

        every = method.local.get("every", 1)
        (last,) = in_turns({label: step}, 1, settle=settle_steps(method) - 1)[label]
        timed = agreed_count(turn_seconds / last / every) * every
        before = wire_bytes()
        seconds = in_turns({label: step}, timed, settle=0)[label]
        dist.barrier()
        if dist.get_rank() == 0:
            sent = (wire_bytes() - before) / timed
            jobs.answer(log, method=label, seconds=seconds, wire_bytes=sent)
        if finish is not None:
            finish()
        del step, wrapped, chosen, finish
        gc.collect()
    dist.destroy_process_group()


def settle_steps(method: Method) -> int:
    """Return how many steps a method takes to settle: `auto` has to try codecs first."""
    if method.local:
        return int(method.local["every"])
    return 330 if method.codec.startswith("auto") else SETTLE


def agreed_count(steps: float) -> int:
    """Return how many steps to time, the same on all ranks."""
    count = torch.tensor([max(2, min(40, round(steps)))])
    dist.broadcast(count, 0)
    return int(count)


def describe(kind: str, model: str, method: Method, ranks: int = RANKS) -> Row:
    """Return a row without measurements."""
    count = sum(p.numel() for p in Transformer(MODELS[model]).parameters())
    return Row(
        kind=kind,
        op="training",
        backend=method.backend,
        ranks=ranks,
        size=4 * count,
        count=count,
        type="float32",
        codec=method.codec or method.momentum or "none",
        model=model,
        parameters=count,
        method=method.label,
        hook=method.hook,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench training", description=__doc__)
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--models", type=arguments.some_of("model", MODELS), default="demo", help=f"of {known}")
    add("--rates", type=arguments.rates, default="100mbit,1gbit", help="of links, as tc has them")
    add("--methods", default="", help="only those in whose label this pattern is found")
    add("--only", choices=("losses", "steps", "optimizer"), help="(losses, then steps)")
    each = "of the trainings; each rank has a batch of its own"
    add("--ranks", type=arguments.counts, default=[RANKS], help=each)
    add("--seeds", type=arguments.counts, default=[0, 1, 2], help="of the trainings")
    add("--rounds", type=arguments.count, default=3, help="turns of every method on a link")
    turn = "of timed steps a turn, but at least two"
    add("--turn-seconds", type=arguments.seconds, default=6.0, help=turn)
    what = "that a timed step computes at least, as a faster or larger model's would"
    add("--compute", type=arguments.seconds, default=0.0, help=what)
    arguments.add_files(parser)
    options = parser.parse_args(argv)
    if 0 in options.ranks:
        parser.error("--ranks 0 starts nothing: want at least 1")
    if options.ranks != [RANKS] and options.only != "losses":
        parser.error("--ranks is for trainings, --only losses: steps on links are those of 2 ranks")
    pattern = options.methods
    try:
        options.methods = [m for m in METHODS if re.search(pattern, m.label)]
    except re.error as error:
        parser.error(f"--methods {pattern!r} is no pattern: {error}")
    if not options.methods:
        labels = "; ".join(method.label for method in METHODS)
        meant = guess(pattern, [method.label for method in METHODS])
        parser.error(f"--methods {pattern!r} fits none of these: {meant}{labels}")
    return options


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

    def measure(results: Iterable[Row]) -> None:
        for row in results:
            rows.append(row)
            value = f"loss {row.loss:.4f}" if row.loss else f"{(row.seconds or 0) * 1e3:.1f} ms"
            what = row.rate or f"{row.ranks} ranks, seed {row.seed}"
            print(f"{row.kind} {row.model} {what}, {row.method}: {value}", flush=True)
            records.append(record(row, origin))
            if csv_path:
                tables.append(csv_path, records[-1:])

    for model in options.models:
        if options.only in (None, "losses"):
            for ranks in options.ranks:
                measure(losses(model, methods, options.seeds, ranks))
        if options.only in (None, "steps"):
            steady = [m for m in methods if not m.scheduled]
            for rate in options.rates if steady else ():
                measure(step_times(model, steady, rate, options))
    show(totals(rows))
    if options.json:
        write_json(Path(options.json), records)
    return 0


if __name__ == "__main__":
    time_on_this_rank(**json.loads(sys.argv[1]))
