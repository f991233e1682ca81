"""A DDP step beside the shortest one that the link allows, for each method in turns.

    python -m pycomm.bench step
    python -m pycomm.bench step --model 124m --rate 10gbit,1gbit --backend nccl,pycomm
    python -m pycomm.bench step --nodes 2 --ranks-per-node 2 --backend cpu:pycomm,cuda:nccl
    python -m pycomm.bench step --model demo --trainings FSDP2
    python -m pycomm.bench step --stand-in

Ranks train a GPT on links between network namespaces (netlab.py): on GPUs, which ranks share where
there are fewer, in bf16 autocast with fused AdamW; else on the CPU, a smaller one. Every row has
the bytes that a node has sent, the wire's time for them at 95 % of its rate, the bound

    B = max(C, first + wire, C + last * wire) + optimizer

and the ratio to it. C is forward and backward, `first` the time until the first bucket is ready,
`last` the share of the last bucket; `alone` is a step whose hook sends nothing. Where there are no
namespaces, pycomm paces its own sockets; other backends then need a lab.

`--stand-in` models the step of a GPU on a virtual clock (stand_in.py), from a checkout: nothing
runs on one. Its parts are launches, copies and Python calls of a bucket, and waits of the host in a
step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pycomm.bench import netlab
from pycomm.bench.__main__ import reported
from pycomm.bench.common import accelerator, arguments
from pycomm.bench.common.harness import Row
from pycomm.bench.common.report import Column, Report
from pycomm.bench.lab import jobs
from pycomm.bench.lab.rates import UNLIMITED, bytes_per_second
from pycomm.bench.step import Pace, rank, stand_in, wire_seconds
from pycomm.bench.training.methods import METHODS, ONE_BUCKET, Method
from pycomm.bench.training.results import describe
from pycomm.bench.training.train import MODELS, parameters
from pycomm.plan.options import count, positive

NAMES = {
    "exact": Method(""),
    "bf16": Method("", hook="bf16"),
    "fp16": Method("", hook="fp16"),
    "powersgd:4": Method("", hook="powersgd:4"),
    "int8": Method("", codec="int8"),
    "int4": Method("", codec="int4"),
    "sign": Method("", momentum="sign"),
}
"""The methods by name; sign travels as the momentum of CodedAdamW."""
ALONE = Method("alone", "none")
"""A step whose hook sends nothing."""
OF_TORCH = ("exact", "bf16", "fp16", "powersgd:4", "int4")
"""Those of backends that are not pycomm's."""
GPU_ONLY = "bf16"  # torch's hook refuses CPUs, which have the one of fp16
COLUMNS = (
    Column("method", -28),
    Column("rate", -9),
    Column("seconds", 8, ".1f", "ms", 1e3),
    Column("wire_bytes", 9, ".2f", "MB/node", 1e-6),
    Column("wire_seconds", 8, ".1f", "wire ms", 1e3),
    Column("bound", 9, ".1f", "bound ms", 1e3),
    Column("ratio", 8, ".2f", "of bound"),
    Column("memory", 7, ".0f", "MiB", 2.0**-20),
    Column("parts", -40),
)


def backends(text: str) -> list[str]:
    """Return the backends of "nccl,pycomm,cpu:pycomm,cuda:nccl", of which the last is one."""
    found: list[str] = []
    for word in text.split(","):
        if found and ":" in word and ":" in found[-1]:
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def methods_of(names: Sequence[str], carriers: Sequence[str]) -> list[Method]:
    """Return each method on each backend that has it."""
    found = []
    for backend in carriers:
        for name in names:
            if "pycomm" in backend and NAMES[name].hook:
                continue
            if "pycomm" not in backend and name not in OF_TORCH:
                continue
            # PowerSGD on Gloo aborts with more than one bucket.
            mb = ONE_BUCKET if (backend, name) == ("gloo", "powersgd:4") else Method.bucket_mb
            label = f"{backend}, {name}"
            found.append(replace(NAMES[name], label=label, backend=backend, bucket_mb=mb))
    return found


def steps(options: argparse.Namespace, rate: str, add: Callable[[Row], object]) -> None:
    """Time methods in turns on links of a rate.

    Args:
        options: of the command line.
        rate: of the links.
        add: takes each row, as soon as it is measured.

    Raises:
        Failed: a rank failed.
    """
    name, config, methods = options.model, MODELS[options.model], options.chosen
    per_node, speed = options.ranks_per_node, bytes_per_second(rate)
    device = accelerator.kind() or "cpu"
    lab, reason = netlab.open_lab(options.nodes, rate, paced=options.paced)
    scale = 1
    if reason:
        print(f"# no lab: {reason}; pycomm paces its sockets, and other backends need a lab")
        methods = [m for m in methods if m.backend == "pycomm"]
        scale = per_node  # the group of one rank counts bytes
        lab = netlab.Lab(options.nodes, f"{8 * speed / per_node:.0f}bit" if speed else rate)
    if not methods:
        return
    on_gpu, ranks = device != "cpu", options.nodes * per_node
    by_label = {method.label: method for method in [ALONE, *methods]}
    shared = accelerator.sharing(ranks) if on_gpu else ""
    where = ", ".join(filter(None, [f"tcp ({lab.congestion})", shared]))
    paces: list[Pace] = []

    def heard(answer: dict[str, Any]) -> None:
        method, parts = by_label[answer["method"]], answer["parts"]
        middle = statistics.fmean if method.local else statistics.median
        seconds = middle(answer["seconds"])
        sent = wire = bound = ratio = None
        if method is ALONE:
            compute = parts["forward"] + parts["backward"]
            paces.append(Pace(answer["first"], compute, parts["optimizer"], answer["last"]))
            parts["first"] = answer["first"]
        else:
            sent = scale * statistics.median(answer["sent"])
            wire = wire_seconds(sent, speed) if speed else None
            if options.compute:  # the share of the time in which a step computes
                ratio = options.compute / seconds
            elif wire is not None and not method.local:
                bound = paces[0].bound(wire)
                ratio = seconds / bound
        row = replace(
            describe("step", name, parameters(config), method, ranks),
            rate=rate,
            connection=where,
            steps=len(answer["seconds"]),
            seconds=seconds,
            wire_bytes=sent,
            wire_seconds=wire,
            bound=bound,
            ratio=ratio,
            memory=answer["memory"],
            parts=" ".join(f"{part}:{1e3 * value:.1f}" for part, value in parts.items()),
        )
        add(row)

    with lab:
        jobs.ask(
            lab,
            rank.time_methods,
            *(config, methods, device, options.rounds, options.turn_seconds),
            *(options.compute, str(options.trace or "")),
            env={"NCCL_SOCKET_IFNAME": lab.interface} if on_gpu else {},
            ranks_per_node=per_node,
            heard=heard,
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench step", description=__doc__)
    add = parser.add_argument
    cuda = bool(accelerator.kind())
    small = "124m" if cuda else "demo"
    what = f"of {', '.join(MODELS)} ({small})"
    add("--model", type=arguments.one_of("model", MODELS), help=what)
    first = "gloo,pycomm"
    if cuda:
        first = "nccl,pycomm" if torch.distributed.is_nccl_available() else "pycomm"
    add("--backend", type=backends, default=first, help=f"such as cpu:pycomm,cuda:nccl ({first})")
    what = "of links, as tc has them"
    add("--rate", type=arguments.rates, default="10gbit,1gbit", help=what)
    add("--nodes", type=arguments.nodes, default=2, help="(2)")
    add("--ranks-per-node", type=count, default=1, help="which share the node's link (1)")
    some = [name for name in NAMES if name != ("fp16" if cuda else GPU_ONLY)]
    known = arguments.some_of("method", NAMES)
    add("--methods", type=known, default=some, help=f"of {', '.join(NAMES)} ({', '.join(some)})")
    what = "instead: methods of `bench training` in whose label this pattern is found"
    add("--trainings", metavar="PATTERN", help=what)
    add("--rounds", type=count, default=2, help="turns of every method on a link (2)")
    what = "of timed steps a turn, but at least two (1)"
    add("--turn-seconds", type=positive, default=1.0, help=what)
    what = "that a timed step computes at least, as a faster or larger model's would"
    add("--compute", type=positive, default=0.0, help=what)
    add("--paced", action="store_true", help="no namespaces: pycomm paces its own sockets")
    what = "write a profile of a step of the last method on the last link, for Perfetto"
    add("--trace", metavar="FILE", type=Path, help=what)
    add("--stand-in", action="store_true", help="model the steps of a GPU with a virtual clock")
    what = "with --stand-in: end with 1 where the engine's goals do not hold, which are told"
    add("--check", action="store_true", help=what)
    arguments.add_csv(parser)
    options = parser.parse(argv)
    if options.check and not options.stand_in:
        parser.error("--check belongs to --stand-in")
    if options.stand_in:
        unknown = ("trainings", "backend", "nodes", "ranks_per_node", "rounds", "turn_seconds")
        parser.refuse(argv, "--stand-in", *unknown, "compute", "paced", "trace")
        options.chosen = options.methods if options.methods != some else list(stand_in.CODECS)
        if not set(options.chosen) <= stand_in.CODECS.keys():
            parser.error(f"--stand-in models {', '.join(stand_in.CODECS)}: name these --methods")
        if strange := [rate for rate in options.rate if "/" in rate or rate == UNLIMITED]:
            parser.error(f"--stand-in models links of one rate both ways, not {strange[0]}")
    elif options.trainings is not None:
        parser.refuse(argv, "--trainings", "methods", "backend")
        # Not those whose codec changes over the steps, so that step times vary.
        steady = {m.label: m for m in METHODS if " " not in m.codec + m.momentum}
        found = arguments.fitting(parser, "--trainings", options.trainings, steady)
        options.chosen = [steady[label] for label in found]
    else:
        options.chosen = methods_of(options.methods, options.backend)
    if not options.chosen:
        parser.error(f"none of --methods {','.join(options.methods)} is for this backend")
    options.model = options.model or ("124m" if options.stand_in else small)
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    device = "stand-in for an H200" if options.stand_in else accelerator.describe()
    report = Report(COLUMNS, options, device=device)
    report.header(f"{report.origin.device}, torch {torch.__version__}, {options.model}")
    if options.trace:
        options.trace.parent.mkdir(parents=True, exist_ok=True)
    if not options.stand_in:
        for rate in options.rate:
            steps(options, rate, report.add)
        return 0
    wrong: list[str] = []
    words = options.model, MODELS[options.model], options.chosen, options.rate
    for row, missed in stand_in.steps(*words):
        report.add(row)
        wrong += missed if options.check else []
    for goal in wrong:
        report.note(f"not yet: {goal}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(reported(partial(main, sys.argv[1:])))
