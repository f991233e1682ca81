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
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.common.arguments import Parser
from pycomm.bench.common.harness import Origin
from pycomm.bench.lab.base import Lab, Paced
from pycomm.bench.lab.jobs import Failed, ask
from pycomm.bench.lab.rates import UNLIMITED
from pycomm.bench.lab.wan import lab_of
from pycomm.bench.peers.results import link, markdown, verdicts
from pycomm.bench.peers.systems import PEERS, Peer

RANKS = 2
RATES, DELAYS = "100mbit,1gbit,10gbit", "0,50"
MODEL = ("steps", "layers", "width")
"""Options of the model and its schedule."""
PATIENCE = 240.0  # seconds of one system's training, or of its steps on a link


def last_line(error: Failed) -> str:
    """Return the line of the ranks' output that says why they ended."""
    what, *lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return [what, *lines, *errors][-1][:200]


def measured(lab: Lab, peer: Peer, options: argparse.Namespace, seconds: float = 0.0) -> list[Any]:
    """Run a system's ranks; return what the first one has answered."""
    return ask(
        lab,
        "pycomm.bench.peers.rank",
        peer.environment,
        limit=PATIENCE,
        peer=peer.name,
        seconds=seconds,
        **{name: getattr(options, name) for name in MODEL},
    )


# ------------------------------------------------------------------------ measurements


def losses(peers: Iterable[Peer], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train each system once, without a limit."""
    for peer in peers:
        row = blank("loss", peer) | {"settings": settings("loss", options)}
        try:
            row["version"] = peer.version()
            with Paced(RANKS, UNLIMITED) as lab:
                rows = measured(lab, peer, options)
            row["curve"] = " ".join(f"{r['step']:g}:{r['held_out']:.6f}" for r in rows)
        except importlib.metadata.PackageNotFoundError as error:
            row["broke"] = f'{error}: pip install "pycomm[peers]"'
        except Failed as error:
            row["broke"] = last_line(error)
        yield row


def steps(
    peers: Iterable[Peer], rate: str, delay: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Let each system take steps on one link.

    Raises:
        Unavailable: there are no network namespaces here.
    """
    for peer in peers:
        row = blank("step", peer) | {"rate": rate, "delay_ms": f"{delay:g}"}
        row["settings"] = settings("step", options)
        try:
            with lab_of(RANKS, f"{rate}@{delay:g}ms" if delay else rate) as lab:
                (found,) = measured(lab, peer, options, options.seconds)
            row |= {"ms": f"{1e3 * found['seconds']:.2f}", "bytes": f"{found['bytes']:.0f}"}
        except Failed as error:
            row["broke"] = last_line(error)
        yield row


def settings(kind: str, options: argparse.Namespace) -> str:
    """Return the settings on which a row's measurements depend."""
    names = (*MODEL, "seconds") if kind == "step" else MODEL
    return " ".join(f"{name}={getattr(options, name):g}" for name in names)


def blank(kind: str, peer: Peer) -> dict[str, Any]:
    """Return a row without measurements."""
    row = dict.fromkeys(("kind", "system", "version", "lines", "rate", "delay_ms"), "")
    row |= dict.fromkeys(("settings", "ms", "bytes", "curve", "broke", "note"), "")
    return row | {"kind": kind, "system": peer.name, "lines": str(peer.lines), "note": peer.note}


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench peers", description=__doc__)
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
