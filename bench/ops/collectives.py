"""Collectives of several backends side by side, with nccl-tests' options and columns.

    python -m pycomm.bench all_reduce -b 8 -e 128M -f 4 -p 2 --backend pycomm,gloo
    torchrun --nproc-per-node 4 -m pycomm.bench all_gather --backend pycomm-torch,gloo

Without torchrun it starts its own ranks. All backends run in the same processes and take turns,
iteration by iteration, so that other load on the machine affects all of them alike. The time of
an iteration is that of its slowest rank. docs/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from pycomm import _C
from pycomm.bench.common import accelerator, arguments
from pycomm.bench.common.harness import format_size
from pycomm.bench.common.report import Column, Report
from pycomm.bench.lab.base import Lab, wait
from pycomm.bench.lab.rates import UNLIMITED
from pycomm.bench.ops import backends, coded
from pycomm.bench.ops.measure import Rank
from pycomm.bench.ops.operations import ALIASES, DTYPES, OPERATIONS, REDUCTIONS
from pycomm.env import env
from pycomm.plan.options import count as above_0
from pycomm.stores import at_master


def columns(options: argparse.Namespace) -> list[Column]:
    return [
        Column("size", 7, format_size),
        Column("count", 9, "d"),
        Column("type", 8),
        Column("redop", 5),
        Column("backend", max(map(len, ["backend", *options.backend]))),
        Column("codec", max(map(len, ["codec", *options.codec]))),
        Column("time_p50", 10, ".2f", "p50(us)"),
        Column("time_p99", 10, ".2f", "p99(us)"),
        *([Column("time_device", 9, ".2f", "GPU(us)")] if options.device == "cuda" else ()),
        Column("algbw", 7, ".3f"),
        Column("busbw", 7, ".3f"),
        Column("effbw", 7, ".3f"),
        Column("wrong", 6, "d", "#wrong"),
        Column("ratio", 6, ".2f"),
        Column("err", 8, ".1e"),
        Column("wire_bytes", 9, ".0f", "wire(B)"),
        Column("cpu_seconds", 8, ".2e", "cpu(s)"),
    ]


def rank_main(options: argparse.Namespace, rank: int, ranks: int) -> int:
    device = accelerator.describe() if options.device == "cuda" else ""
    shown = [] if options.explain else columns(options)
    # Before the rank is pinned to one of the cores that rows name.
    report = Report(shown, options, quiet=rank != 0, device=device)
    member = Rank(options, rank, ranks, at_master(rank, _C.CommunicatorOptions()))
    origin = report.origin
    connections = [f"{b.name}: {b.describe()}" for b in member.backends]
    where = f"{origin.device}, {origin.cores} cores, commit {origin.commit or 'unknown'}"
    report.header(f"{options.op}, {ranks} ranks on {where}", *connections)
    if options.explain:
        member.explain(report)
        member.close()
        return 0
    right = member.run(report)
    if rank == 0 and not right:
        print("WRONG: the column #wrong counts elements with a wrong value", file=sys.stderr)
    member.close()
    return 0 if right or rank != 0 else 1


def launch(argv: Sequence[str], ranks: int) -> int:
    """Start this program once per rank; the first failure ends all ranks."""
    command = [sys.executable, "-m", "pycomm.bench", *argv]
    with Lab(1, UNLIMITED) as lab:
        started = lab.start(command, ranks_per_node=ranks)
        status = wait(started)
        for rank, process in enumerate(started):
            if process.returncode:
                print(f"rank {rank} ended with {process.returncode}", file=sys.stderr)
    return 1 if status else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench", description=__doc__)
    add, count, some = parser.add_argument, arguments.count, arguments.all_or_one_of
    what = f"one of {', '.join(OPERATIONS)}"
    add("op", type=arguments.one_of("collective", OPERATIONS), metavar="OP", help=what)
    arguments.add_sizes(parser, "8", "64M", 2)
    what = "iterations that are timed (as many as fit half a second, at least 20)"
    add("-n", "--iters", dest="iterations", type=count, default=0, metavar="N", help=what)
    what = "iterations before them (5)"
    add("-w", "--warmup_iters", dest="warmup", type=count, default=5, metavar="N", help=what)
    what = "iterations whose results are checked; 0: none (1)"
    add("-c", "--check", type=count, default=1, metavar="N", help=what)
    types = [*DTYPES, *ALIASES]
    what = f"of elements: {', '.join(types)}, or all (float)"
    kind = some("type", types)
    add("-d", "--datatype", dest="dtypes", type=kind, default="float", metavar="TYPE", help=what)
    what = f"{', '.join(REDUCTIONS)}, or all (sum)"
    kind = some("reduction", REDUCTIONS)
    add("-o", "--op", dest="redops", type=kind, default="sum", metavar="REDOP", help=what)
    what = "ranks to start (2); -g as in nccl-tests, where each GPU has one"
    add("-p", "--ranks", "-g", "--ngpus", type=above_0, default=2, metavar="N", help=what)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the buffers are (cpu)")
    on_device = ", ".join(backends.ON_DEVICE)
    what = (
        f"of {', '.join(backends.ON_CPU)}; they take turns (pycomm); on cuda of {on_device} (all)"
    )
    kind = arguments.some_of("backend", dict.fromkeys((*backends.ON_CPU, *backends.ON_DEVICE)))
    add("--backend", type=kind, metavar="NAME,...", help=what)
    what = "none,int8,topk:0.01 and so on; each is a row of every backend of ours (none)"
    add("--codec", type=arguments.codecs, default="none", metavar="CODEC,...", help=what)
    what = "print which algorithm of pycomm each size takes, and why, and measure nothing"
    add("--explain", action="store_true", help=what)
    arguments.add_csv(parser)
    options = parser.parse(argv)
    known: Sequence[str] = backends.ON_DEVICE if options.device == "cuda" else backends.ON_CPU
    if not options.backend:
        usual = backends.ON_DEVICE if options.device == "cuda" else ["pycomm"]
        nccl = torch.distributed.is_nccl_available()
        options.backend = [name for name in usual if nccl or "nccl" not in name]
    if strange := [name for name in options.backend if name not in known]:
        parser.error(f"--backend {strange[0]} is not for --device {options.device}")
    options.sizes = arguments.checked_sizes(parser, options)
    options.dtypes = list(dict.fromkeys(ALIASES.get(name, name) for name in options.dtypes))
    if options.explain and not any(
        name.partition(":")[0] in backends.CORE for name in options.backend
    ):
        parser.error(f"--explain is for {', '.join(backends.CORE)}: add one to --backend")
    if options.codec != ["none"]:
        _check_codecs(parser, options)
    return options


def _check_codecs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.op not in coded.CORE:
        parser.error(f"--codec is for {', '.join(coded.CORE)}; {options.op} has no coded form")
    if not set(options.dtypes) & set(coded.ROUNDING):
        known = ", ".join(coded.ROUNDING)
        parser.error(f"--codec is for {known}, not for -d {', '.join(options.dtypes)}")
    if not any(name.startswith("pycomm") for name in options.backend):
        parser.error("--codec is for backends of pycomm: add one to --backend")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    rank, ranks = env().rank, env().world_size
    if options.device == "cuda" and not accelerator.kind():
        needs = "an NVIDIA GPU, its driver, and a torch that was built for CUDA"
        print(f"python -m pycomm.bench: --device cuda needs {needs}", file=sys.stderr)
        return 2
    if rank is None or ranks is None:
        return launch(argv, options.ranks)
    return rank_main(options, rank, ranks)
