"""LocalSGD on slow links and with slow ranks: losses, the share of time that computes, bytes.

    python -m pycomm.bench.local_sgd --csv bench/results/local-sgd-cpu.csv

    losses  the demo's model (training/train.py) on two ranks, once per seed and method. `ratio` is
            how many times fewer bytes a rank sends than dense DiLoCo in float32, `change` the loss
            on held-out text against the method that `vs` names
    stream  25 million parameters on a link of 5 Mbit/s up and 20 down (netlab.py). A local step
            is a wait of --step-seconds, as if a GPU computed it, and every fifth moves the
            parameters; `ratio` is the share of time outside `LocalSGD.step`, which codes, and
            waits for the network
    quorum  the demo's model on three ranks, whose steps take 1, 1 and 2.5 times --pace. `ratio` is
            the steps of all ranks together over the sum of their speeds; `change` is the loss
            against blocking rounds of ranks of one speed, with as many samples

`wire_bytes` are those that a rank sends in a round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.bench import netlab
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin, Row, record
from pycomm.bench.training.corpora import standard_library
from pycomm.bench.training.train import (
    FINAL_WINDOWS,
    Config,
    Transformer,
    batches,
    evaluate,
    loss_of,
    schedule,
    wire_bytes,
)
from pycomm.reduction.cost import sent_bytes

DEMO, LARGE = Config(), Config(layers=8, width=512, heads=8)
SPARSE = "topk:0.015625,chunk=4096,values=bins2"  # 64 of 4096
SPARSELOCO = {"codec": SPARSE, "lr": 1.0, "momentum": 0.0, "feedback": "decay:0.95"}
SPARSELOCO |= {"average": "senders"}
BLOCKING = {"every": 30, "codec": "int4"}
STREAM = {**BLOCKING, "fragments": 6, "overlap": 5}
METHODS: dict[str, dict[str, Any]] = {
    "DiLoCo, fp32": {"every": 15, "codec": "fp32"},
    "SparseLoCo, 64 of 4096 in 2 bits": {"every": 15, **SPARSELOCO},
    "DiLoCo, int4": BLOCKING,
    "Streaming DiLoCo, int4": STREAM,
}
AGAINST = dict(zip(list(METHODS)[1::2], list(METHODS)[::2], strict=True))
LINKS: dict[str, dict[str, Any]] = {
    "DiLoCo, int4": BLOCKING,
    "Streaming DiLoCo, int4": STREAM,
    "Streaming SparseLoCo": {"every": 30, "fragments": 6, "overlap": 5, **SPARSELOCO},
}
SPEEDS = (1.0, 1.0, 0.4)


def local_sgd(model: nn.Module, options: dict[str, Any]) -> pycomm.LocalSGD:
    """Return LocalSGD with these options; norms and biases travel in int8 with a sparse codec."""
    options = dict(options)
    if options["codec"] == SPARSE:
        rules = (pycomm.Rule(codec="int8", max_dims=1),)
        options["codec"] = pycomm.Policy(SPARSE, rules=rules, guard=None)
    return pycomm.LocalSGD(model, **options)


def sent_in_a_round(local: pycomm.LocalSGD) -> int:
    """Return the bytes of a round by the codecs' sizes."""
    ranks = dist.get_world_size()
    return sent_bytes(local.state, local.state.decisions, ranks)


# ------------------------------------------------------------------ what the ranks run


def train(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Train as DDP's demo does, with rounds of local steps."""
    torch.manual_seed(config.seed)
    model = Transformer(config)
    local = local_sgd(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, config))
    text, held_out = standard_library()
    data = batches(text, config, dist.get_rank(), dist.get_world_size())
    for _ in range(config.steps):
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        local.step()
    local.finish()
    loss = evaluate(model, held_out, config, FINAL_WINDOWS)
    return {"loss": loss, "bytes": sent_in_a_round(local)}


def stream(options: dict[str, Any], rounds: int, step_seconds: float) -> dict[str, Any]:
    """Take steps without arithmetic; return the time of the last rounds and their bytes."""
    torch.manual_seed(0)
    model = Transformer(LARGE)
    local = local_sgd(model, options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    moves = [1e-3 * torch.randn(p.shape, generator=generator) for p in model.parameters()]
    begin, sent, waited = 0.0, 0, 0.0
    for step in range((1 + rounds) * local.every):
        if step == local.every:
            dist.barrier()
            begin, sent, waited = time.perf_counter(), wire_bytes(), 0.0
        until = time.perf_counter() + step_seconds
        if step % 5 == 0:  # not in each step: the arithmetic is not what is measured
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
        time.sleep(max(0.0, until - time.perf_counter()))
        ended = time.perf_counter()
        local.step()
        waited += time.perf_counter() - ended
    seconds = time.perf_counter() - begin
    sent = (wire_bytes() - sent) // rounds
    local.finish()
    return {"used": 1 - waited / seconds, "seconds": seconds, "bytes": sent}


def race(config: Config, pace: float, duration: float, steps: int) -> dict[str, Any]:
    """Train for a time with a quorum, each rank at its speed; or `steps` blocking steps."""
    torch.manual_seed(config.seed)
    model = Transformer(config)
    options: dict[str, Any] = {"every": 15, "codec": "int8"}
    if not steps:
        # The slowest step takes 2.5 times the pace: the others train meanwhile.
        options |= {"quorum": 2, "grace": 4 * pace, "overlap": 3}
    local = pycomm.LocalSGD(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95))
    text, held_out = standard_library()
    data = batches(text, config, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    start, taken, late = time.perf_counter(), 0, 0
    while taken < steps if steps else time.perf_counter() - start < duration:
        until = time.perf_counter() + (0 if steps else pace / SPEEDS[dist.get_rank()])
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        missed = time.perf_counter() > until
        late += missed
        time.sleep(max(0.0, until - time.perf_counter()))
        local.step()
        taken += 1
    seconds = time.perf_counter() - start
    local.finish()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (taken, taken / seconds, late))
    return {
        "loss": evaluate(model, held_out, config, FINAL_WINDOWS),
        "steps": [one[0] for one in everyone],
        "used": sum(one[1] for one in everyone) * pace / sum(SPEEDS),
        "missed": [one[2] for one in everyone],  # steps whose arithmetic took longer than the pace
        "rounds": local.rounds,
    }


def run_rank(job: dict[str, Any], log: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    kind = job.pop("kind")
    if "config" in job:
        job["config"] = Config(**job["config"])
    result = {"train": train, "stream": stream, "race": race}[kind](**job)
    if dist.get_rank() == 0:
        log.write_text(json.dumps(result))
    dist.destroy_process_group()


# ------------------------------------------------------------------ what starts them


def measure(lab: netlab.Lab, **job: Any) -> dict[str, Any]:
    """Run a job on the lab's nodes; return the first rank's result.

    Raises:
        RuntimeError: a rank failed; the text is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "pycomm.bench.local_sgd", "--job", json.dumps(job)]
        with Path(folder, "output").open("wb") as output:
            ranks = lab.start([*command, f"--log={log}"], stdout=output, stderr=subprocess.STDOUT)
            status = netlab.wait(ranks)
            lab.stop()
        if status:
            raise RuntimeError(Path(folder, "output").read_text(errors="replace"))
        result: dict[str, Any] = json.loads(log.read_text())
        return result


def row(config: Config, ranks: int, **values: Any) -> Row:
    count = sum(p.numel() for p in Transformer(config).parameters())
    common = {"op": "LocalSGD", "backend": "pycomm", "type": "float32"}
    return Row(ranks=ranks, size=4 * count, count=count, parameters=count, **common, **values)


def losses(seeds: int, steps: int) -> Iterator[Row]:
    for seed in range(seeds):
        config = replace(DEMO, seed=seed, steps=steps)
        results: dict[str, dict[str, Any]] = {}
        dense = 0
        for method, options in METHODS.items():
            with netlab.Paced(2, netlab.UNLIMITED) as lab:
                made = measure(lab, kind="train", config=vars(config), options=options)
            results[method] = made
            dense = dense or made["bytes"]
            other = AGAINST.get(method, "")
            yield row(
                config,
                2,
                kind="loss",
                model="demo",
                method=method,
                codec=options["codec"],
                seed=seed,
                steps=steps,
                windows=FINAL_WINDOWS,
                loss=made["loss"],
                vs=other,
                change=made["loss"] / results[other]["loss"] - 1 if other else None,
                wire_bytes=made["bytes"],
                ratio=dense / made["bytes"],
            )


def streams(rate: str, rounds: int, step_seconds: float, methods: str) -> Iterator[Row]:
    for method, options in LINKS.items():
        if methods not in method:
            continue
        with netlab.Netlab(2, rate) as lab:
            made = measure(
                lab, kind="stream", options=options, rounds=rounds, step_seconds=step_seconds
            )
            yield row(
                LARGE,
                2,
                kind="step",
                model="25m",
                method=method,
                codec=options["codec"],
                rate=rate,
                steps=rounds * options["every"],
                seconds=made["seconds"] / rounds / options["every"],
                ratio=made["used"],
                wire_bytes=made["bytes"],
                connection=lab.describe(),
            )


def races(seeds: int, pace: float, duration: float) -> Iterator[Row]:
    for seed in range(seeds):
        config = replace(DEMO, seed=seed, batch=4)
        found = []
        for method in ("quorum of 2 of 3", "blocking, one speed"):
            steps = -(-sum(found[0]["steps"]) // 3) if found else 0
            with netlab.Paced(3, netlab.UNLIMITED) as lab:
                made = measure(
                    lab, kind="race", config=vars(config), pace=pace, duration=duration, steps=steps
                )
            found.append(made)
            print(f"# {method}: {made}", flush=True)
            yield row(
                config,
                3,
                kind="loss",
                model="demo",
                method=method,
                codec="int8",
                seed=seed,
                steps=sum(made["steps"]),
                windows=FINAL_WINDOWS,
                loss=made["loss"],
                ratio=None if steps else made["used"],
                vs="quorum of 2 of 3" if steps else "",
                change=made["loss"] / found[0]["loss"] - 1 if steps else None,
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench.local_sgd", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=("losses", "stream", "quorum"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=DEMO.steps, help="of losses")
    parser.add_argument("--rate", default="5mbit/20mbit", help="of each link, up/down")
    parser.add_argument("--rounds", type=int, default=2, help="of stream that are timed")
    parser.add_argument("--method", default="", help="of stream: those with this in their names")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="of stream")
    parser.add_argument("--pace", type=float, default=0.5, help="seconds of a fast rank's step")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of quorum")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run_rank(json.loads(args.job), args.log)
        return 0
    parts = {
        "losses": lambda: losses(args.seeds, args.steps),
        "stream": lambda: streams(args.rate, args.rounds, args.step_seconds, args.method),
        "quorum": lambda: races(args.seeds, args.pace, args.duration),
    }
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.local_sgd", *sys.argv[1:]]))
    try:
        for name, part in parts.items():
            if args.only in (None, name):
                for found in part():
                    show(found)
                    if args.csv:
                        tables.append(args.csv, [record(found, origin)])
    except netlab.Unavailable as error:
        print(f"local_sgd: namespaces cannot be made here: {error}", file=sys.stderr)
        return 2
    return 0


def show(found: Row) -> None:
    loss = "" if found.loss is None else f"loss {found.loss:.4f} "
    change = "" if found.change is None else f"({found.change:+.2%} against {found.vs}) "
    ratio = "" if found.ratio is None else f"ratio {found.ratio:.3f} "
    sent = "" if found.wire_bytes is None else f"{found.wire_bytes / 1e3:.1f} kB a round"
    seed = "" if found.seed is None else f"seed {found.seed}: "
    print(f"{found.method:<34} {seed}{loss}{change}{ratio}{sent}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
