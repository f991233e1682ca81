"""The peers' table: time to a loss, bytes and lines of other systems and of pycomm.

    python -m pycomm.bench peers --csv bench/results/peers-cpu.csv

All train one model, with their own defaults, on two ranks. The loss after a step does not depend on
the link, so losses and times are measured separately, as in `bench training`: each system trains
once without a limit, for a quarter more steps than the schedule has; and it takes steps on each
link (network namespaces; delay by a program in user space). The time to the loss is the number of
steps after which its loss has come down to that of DDP in float32 at the end of the schedule, times
its mean step. A system that fails gets a row with the line of its output that says why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pycomm.bench import netlab
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.lab.shape import Shape
from pycomm.bench.lab.wan import WanLab
from pycomm.bench.peers.results import link, markdown, verdicts
from pycomm.bench.peers.systems import PEERS, Peer

RANKS = 2
RATES, DELAYS = "100mbit,1gbit,10gbit", "0,50"
PATIENCE = 240.0  # seconds of one system's training, or of its steps on a link


class PeerFailed(RuntimeError):
    """A rank failed or took too long; the text is the last line of its output."""


def run(lab: netlab.Lab, peer: Peer, words: Sequence[str], limit: float) -> list[dict[str, float]]:
    """Run a system's ranks; return what the first one has written.

    Raises:
        PeerFailed: a rank has failed, or none has ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder, "log"), Path(folder, "output")
        command = [sys.executable, "-m", "pycomm.bench.peers.rank", "--peer", peer.name]
        command += [*words, "--log", str(log)]
        until = time.monotonic() + limit

        def watch() -> None:
            if time.monotonic() > until:
                raise PeerFailed(f"it has not ended after {limit:.0f} s: {last_line(output)}")

        with output.open("wb") as out:
            ranks = lab.start(
                command,
                env={**os.environ, **peer.environment},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                status = netlab.wait(ranks, watch=watch)
            finally:
                lab.stop()
        if status or not log.exists():
            raise PeerFailed(last_line(output))
        rows: list[dict[str, float]] = json.loads(log.read_text())
        return rows


def last_line(output: Path) -> str:
    """Return the line of an output that says why it ended."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return ([*filter(None, lines), *errors] or ["no output"])[-1][:200]


# ------------------------------------------------------------------------ measurements


def losses(peers: Iterable[Peer], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train each system once, without a limit."""
    for peer in peers:
        row = blank("loss", peer) | {"settings": settings("loss", options)}
        try:
            row["version"] = peer.version()
            with netlab.Paced(RANKS, netlab.UNLIMITED) as lab:
                rows = run(lab, peer, model_words(options), PATIENCE)
            row["curve"] = " ".join(f"{r['step']:g}:{r['held_out']:.6f}" for r in rows)
        except importlib.metadata.PackageNotFoundError as error:
            row["broke"] = f'{error}: pip install "pycomm[peers]"'
        except PeerFailed as error:
            row["broke"] = str(error)
        yield row


def steps(
    peers: Iterable[Peer], rate: str, delay: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Let each system take steps on one link.

    Raises:
        Unavailable: there are no network namespaces here.
    """
    # A delay is that of a round trip; each way has a half.
    shape = Shape(delay=delay / 2e3)
    for peer in peers:
        row = blank("step", peer) | {"rate": rate, "delay_ms": f"{delay:g}"}
        row["settings"] = settings("step", options)
        words = [*model_words(options), "--steps-only", str(options.seconds)]
        try:
            with WanLab(RANKS, rate, shape=shape) if delay else netlab.Netlab(RANKS, rate) as lab:
                (found,) = run(lab, peer, words, PATIENCE)
            row |= {"ms": f"{1e3 * found['seconds']:.2f}", "bytes": f"{found['bytes']:.0f}"}
        except PeerFailed as error:
            row["broke"] = str(error)
        yield row


def model_words(options: argparse.Namespace) -> list[str]:
    return [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width")]


def settings(kind: str, options: argparse.Namespace) -> str:
    """Return the settings on which a row's measurements depend."""
    names = (
        ("steps", "layers", "width", "seconds") if kind == "step" else ("steps", "layers", "width")
    )
    return " ".join(f"{name}={getattr(options, name):g}" for name in names)


def blank(kind: str, peer: Peer) -> dict[str, Any]:
    """Return a row without measurements."""
    row = dict.fromkeys(("kind", "system", "version", "lines", "rate", "delay_ms"), "")
    row |= dict.fromkeys(("settings", "ms", "bytes", "curve", "broke", "note"), "")
    return row | {"kind": kind, "system": peer.name, "lines": str(peer.lines), "note": peer.note}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", default=RATES, help=f"of links, joined by commas ({RATES})")
    add("--delays", default=DELAYS, help=f"of round trips, in ms ({DELAYS})")
    add("--peers", default="", help="only those in whose name this pattern is found")
    add("--seconds", type=float, default=6.0, help="of timed steps on each link (6)")
    add("--steps", type=int, default=200, help="of the learning rate's schedule (200)")
    add("--layers", type=int, default=2, help="of the model (2)")
    add("--width", type=int, default=224, help="of the model (224)")
    add("--csv", type=Path, default=None, help="file to which rows are added")
    add("--show", action="store_true", help="measure nothing: print the table of --csv")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench", "peers", *argv]))
    rows = tables.read(options.csv) if options.csv and options.csv.exists() else []
    for row in () if options.show else measure(options):
        what = row["broke"] or row["curve"].rpartition(" ")[2] or f"{row['ms']} ms a step"
        print(" ".join(filter(None, (row["kind"], *link(row), row["system"]))), what, flush=True)
        rows.append(row | vars(origin))
        if options.csv:
            tables.append(options.csv, rows[-1:])
    same = {settings(kind, options) for kind in ("loss", "step")}
    shown = [{k: str(v) for k, v in row.items()} for row in rows if row["settings"] in same]
    print(markdown(shown, options.steps))
    print("\n".join(["", *verdicts(shown, options.steps)]))
    return 0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all systems and links, without links for systems that are broken."""
    peers = [peer for peer in PEERS if re.search(options.peers, peer.name)]
    broken = set()
    for row in losses(peers, options):
        yield row
        broken |= {row["system"]} if row["broke"] else set()
    peers = [peer for peer in peers if peer.name not in broken]
    for delay in options.delays.split(","):
        for rate in options.rates.split(","):
            yield from steps(peers, rate, float(delay), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
