"""`python -m pycomm.plan probe`: starts ranks or joins torchrun's, and writes what they measure."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pycomm.env import env, variables_of_rank
from pycomm.plan import show
from pycomm.plan.probed import Probe
from pycomm.plan.units import format_rate, format_time

TIMEOUT = 120.0
"""seconds after which ranks that this program has started are ended"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.plan probe",
        description="Measures links and codecs of the ranks it runs on: of torchrun, or two here.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("probe.json"), help="file that is written (probe.json)")
    add("--ranks", "-n", type=int, default=2, help="to start, without torchrun (2)")
    add("--store", type=Path, help="folder where ranks meet: shared by all nodes")
    add("--effort", type=float, default=1.0, help="share of the usual time to take (1)")
    options = parser.parse_args(argv)
    rank, size = env().rank, env().world_size
    if rank is not None and size is not None:
        here = env().local_world_size or size
        if here < size and not options.store:
            parser.error(
                f"{size} ranks on nodes of {here} cannot meet in a folder of their own: name a new "
                "one that all nodes share with --store"
            )
        folder = options.store or _meeting_place()
        folder.mkdir(parents=True, exist_ok=True)
        return _join(folder, rank, size, options)
    if options.ranks < 2:
        parser.error("one rank has no links to probe: --ranks 2 or more")
    with tempfile.TemporaryDirectory(prefix="pycomm-probe-") as made:
        words = ["--store", made, "--out", str(options.out), "--effort", str(options.effort)]
        return _start(options.ranks, words)


def _meeting_place() -> Path:
    """The same for all ranks that one torchrun has started on a machine."""
    return Path(tempfile.gettempdir()) / f"pycomm-probe-{os.getppid()}"


def _start(ranks: int, words: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pycomm.plan", "probe", *words]
    started = [subprocess.Popen(command, env=variables_of_rank(r, ranks)) for r in range(ranks)]
    try:
        return max(abs(process.wait(TIMEOUT)) for process in started)
    except subprocess.TimeoutExpired:
        print(f"probe: ranks did not end within {TIMEOUT:.0f} s", file=sys.stderr)
        return 1
    finally:
        for process in started:
            process.kill()


def _join(folder: Path, rank: int, size: int, options: argparse.Namespace) -> int:
    from pycomm.plan.probe import run

    try:
        found = run(folder, rank, size, options.effort)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if found is not None:
        found.write(options.out)
        report(found)
        print(f"written to {options.out}")
    return 0


def report(probe: Probe) -> None:
    """What was found, as tables."""
    links = []
    for level, link in (("between nodes", probe.inter), ("inside a node", probe.intra)):
        if link:
            costs = (format_time(link.message), f"{link.byte * 1e9:.2f} ns")
            links.append((level, format_rate(link.rate), format_time(link.latency), *costs))
    where = f"{probe.ranks} ranks, {probe.nodes} nodes, {probe.cores} cores of a machine"
    show.table(("link", "rate", "latency", "message", "byte"), links, where, words=1)
    rows = [
        (
            name,
            *(
                f"{rate / 1e9:.2f}"
                for rate in (rates.encode, rates.encode_fed, rates.decode, rates.decode_add)
            ),
        )
        for name, rates in probe.codecs.items()
    ]
    head = ("codec, GB/s", "encode", "with feedback", "decode", "decode_add")
    show.table(head, rows, f"one core; adding reads {probe.memory / 1e9:.1f} GB/s", words=1)
