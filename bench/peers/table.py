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

import importlib.metadata
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pycomm.bench.common import arguments, report, tables
from pycomm.bench.common.report import Column, Report
from pycomm.bench.lab.base import Lab, Paced
from pycomm.bench.lab.jobs import Failed, ask
from pycomm.bench.lab.rates import UNLIMITED
from pycomm.bench.lab.wan import lab_of
from pycomm.bench.peers.systems import PEERS, Peer
from pycomm.bench.training.results import steps_to_loss
from pycomm.bench.training.train import Config, ranks_train
from pycomm.units import parse_rate

RANKS, CONFIG = 2, Config()
RATES, DELAYS = "100mbit,1gbit,10gbit", "0,50"
PATIENCE = 240.0  # seconds of one system's training, or of its steps on a link
SETTLE, STEPS = 3, 20  # untimed and timed steps; else one round and two, of steps between averages


def last_line(error: Failed) -> str:
    """Return the line of the ranks' output that says why they ended."""
    what, *lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return [what, *lines, *errors][-1][:200]


def measured(lab: Lab, peer: Peer, config: Config) -> list[dict[str, float]]:
    """Train with a system; return the record of each step.

    Raises:
        Failed: a rank failed, or has not ended in time.
    """
    found = ask(lab, ranks_train, config, [peer.method], env=peer.environment, limit=PATIENCE)
    return [row for row in found if "step" in row]


# ------------------------------------------------------------------------ measurements


def losses(peers: Iterable[Peer]) -> Iterator[dict[str, Any]]:
    """Train each system once, without a limit."""
    for peer in peers:
        row = blank("loss", peer)
        try:
            row["version"] = peer.version()
            with Paced(RANKS, UNLIMITED) as lab:
                lab.timed = False  # losses do not depend on it
                rows = measured(lab, peer, replace(CONFIG, extra=CONFIG.steps // 4))
            judged = [r for r in rows if "held_out" in r]
            row["curve"] = " ".join(f"{r['step']:g}:{r['held_out']:.6f}" for r in judged)
        except importlib.metadata.PackageNotFoundError as error:
            row["broke"] = f'{error}: pip install "pycomm[peers]"'
        except Failed as error:
            row["broke"] = last_line(error)
        yield row


def steps(peers: Iterable[Peer], rate: str, delay: float) -> Iterator[dict[str, Any]]:
    """Let each system take steps on one link.

    Raises:
        LabUnavailable: there are no network namespaces here.
    """
    for peer in peers:
        row = blank("step", peer) | {"rate": rate, "delay_ms": f"{delay:g}"}
        settle, count = (SETTLE, STEPS) if peer.every == 1 else (peer.every, 2 * peer.every)
        config = replace(CONFIG, steps=settle + count, evaluate_every=settle + count)
        try:
            with lab_of(RANKS, f"{rate}@{delay:g}ms" if delay else rate) as lab:
                rows = measured(lab, peer, config)
            first, last = rows[settle - 1], rows[-1]
            mean = {name: (last[name] - first[name]) / count for name in ("seconds", "sent")}
            row |= {"ms": f"{1e3 * mean['seconds']:.2f}", "bytes": f"{mean['sent']:.0f}"}
        except Failed as error:
            row["broke"] = last_line(error)
        yield row


def blank(kind: str, peer: Peer) -> dict[str, Any]:
    """Return a row without measurements."""
    row = dict.fromkeys(("kind", "system", "version", "lines", "rate", "delay_ms"), "")
    row |= dict.fromkeys(("ms", "bytes", "curve", "broke"), "")
    return row | {"kind": kind, "system": peer.name, "lines": str(peer.lines)}


COLUMNS = (
    Column("kind", -4),
    Column("rate", -8),
    Column("delay_ms", 8),
    Column("system", -34),
    Column("ms", 8),
    Column("bytes", 9),
    Column("curve", 15, lambda curve: curve.rpartition(" ")[2], "step:loss"),
    Column("broke", -40),
)


def main(argv: Sequence[str]) -> int:
    parser = arguments.Parser(prog="python -m pycomm.bench peers", description=__doc__)
    add = parser.add_argument
    add("--rates", type=arguments.rates, default=RATES, help=f"of links ({RATES})")
    add("--delays", type=arguments.listed(float), default=DELAYS, help=f"in ms ({DELAYS})")
    add("--peers", default="", help="only those in whose name this pattern is found")
    arguments.add_csv(parser)
    options = parser.parse(argv)
    output = Report(COLUMNS, options)
    output.header()
    peers, broken = [p for p in PEERS if re.search(options.peers, p.name)], set()
    for row in losses(peers):
        output.add(row)
        broken |= {row["system"]} if row["broke"] else set()
    whole = [peer for peer in peers if peer.name not in broken]
    for delay, rate in itertools.product(options.delays, options.rates):
        for row in steps(whole, rate, delay):
            output.add(row)
    print(markdown([{k: str(v) for k, v in row.items()} for row in output.records()]))
    return 0


# ------------------------------------------------------------------------ seconds to the loss

REFERENCE = PEERS[0].name


def link(row: tables.Row) -> tuple[str, str]:
    return row["rate"], row["delay_ms"]


def seconds_to_loss(rows: Sequence[tables.Row]) -> dict[Any, float | None]:
    """Return the seconds to the reference's loss, by system and link; None: never, or broken."""
    rows = tables.newest(rows, "kind", "system", "rate", "delay_ms")
    curves = {r["system"]: tables.parse_curve(r["curve"]) for r in rows if r["curve"]}
    if REFERENCE not in curves:
        return {}
    target = curves[REFERENCE][CONFIG.steps]
    counts = {name: steps_to_loss([curve], target) for name, curve in curves.items()}
    found: dict[Any, float | None] = {}
    for row in rows:
        if row["kind"] == "step":
            count = counts.get(row["system"])
            known = count is not None and row["ms"]
            found[row["system"], link(row)] = count * float(row["ms"]) / 1e3 if known else None
    return found


def links_of(rows: Sequence[tables.Row]) -> list[tuple[str, str]]:
    """Return the links of the rows' steps, by their round trip and then by their rate."""
    links = {link(row) for row in rows if row["kind"] == "step"}
    return sorted(links, key=lambda place: (float(place[1]), parse_rate(place[0])[0]))


def markdown(rows: Sequence[tables.Row]) -> str:
    """Return the table of seconds to the loss, with the times of the first in each column bold."""
    found = seconds_to_loss(rows)
    links = links_of(rows)
    best = {}
    for place in links:
        times = [t for (_, where), t in found.items() if where == place and t is not None]
        best[place] = min(times, default=None)
    names = [f"{rate}, {delay} ms" for rate, delay in links]
    broken = any(row["broke"] for row in rows)
    head = ["system", "lines", *names, "MB a step", *["what broke"] * broken]
    lines = []
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = tables.newest([r for r in rows if r["system"] == name], "kind", "rate", "delay_ms")
        cells = []
        for place in links:
            seconds = found.get((name, place))
            text = "" if seconds is None else f"{seconds:.1f}"
            cells.append(f"**{text}**" if text and seconds == best[place] else text or "-")
        sent = [float(r["bytes"]) for r in mine if r["bytes"]]
        cells.append(f"{min(sent) / 1e6:.3f}" if sent else "-")
        why = "; ".join(dict.fromkeys(r["broke"] for r in mine if r["broke"]))
        lines.append([name, mine[0]["lines"], *cells, *[why] * broken])
    return report.markdown(head, lines, left=len(head))
