"""`python -m pycomm.plan probe`: starts ranks or joins torchrun's, and writes the measurements."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm.env import env, variables_of_rank
from pycomm.plan import options, show
from pycomm.plan.probe.measure import run
from pycomm.plan.probe.result import ClusterProbe
from pycomm.units import format_rate, format_time

TIMEOUT = 120.0
"""Seconds after which ranks that this program has started are killed."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.plan probe",
        description="Measures links and codecs of the ranks it runs on: of torchrun, or two here.",
    )
    add = parser.add_argument
    path = "file that is written (probe.json)"
    add("--out", type=options.file, default=Path("probe.json"), help=path)
    add("--ranks", "-n", type=options.count, default=2, help="to start, without torchrun (2)")
    add("--effort", type=options.share, default=1.0, help="share of the usual time to take (1)")
    given = parser.parse_args(argv)
    rank = env().rank
    size = None if rank is None else env().world_size
    if (given.ranks if size is None else size) < 2:
        parser.error("one rank has no links to probe: start two or more")
    if rank is None or size is None:
        return _start(given.ranks, ["--out", str(given.out), "--effort", str(given.effort)])
    found = run(rank, size, given.effort)
    if found is not None:
        found.write(given.out)
        report(found)
        print(f"written to {given.out}")
    return 0


def _start(ranks: int, words: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pycomm.plan", "probe", *words]
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen(command, env=variables_of_rank(rank, ranks) | master)
        for rank in range(ranks)
    ]
    try:
        return max(abs(process.wait(TIMEOUT)) for process in started)
    except subprocess.TimeoutExpired:
        print(f"probe: ranks did not end within {TIMEOUT:.0f} s", file=sys.stderr)
        return 1
    finally:
        for process in started:
            process.kill()


def report(probe: ClusterProbe) -> None:
    """Print what was measured of the links; the file has that of codecs, too."""
    links = []
    for level, link in (("between nodes", probe.inter), ("inside a node", probe.intra)):
        if link:
            costs = (format_time(link.message), f"{link.byte * 1e9:.2f} ns")
            links.append((level, format_rate(link.rate), format_time(link.latency), *costs))
    where = f"{probe.ranks} ranks, {probe.nodes} nodes, {probe.cores} cores of a machine"
    show.table(("link", "rate", "latency", "message", "byte"), links, where, words=1)
