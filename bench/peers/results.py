"""Results derived from the rows of the peers' table: seconds to a loss, as a table and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.lab.shape import bits
from pycomm.bench.peers.systems import PEERS
from pycomm.bench.training.results import parse_curve, steps_to_loss

REFERENCE = PEERS[0].name


def link(row: tables.Row) -> tuple[str, str]:
    return row["rate"], row["delay_ms"]


def seconds_to_loss(rows: Sequence[tables.Row], target_step: int) -> dict[Any, float | None]:
    """Return the seconds to the reference's loss, by system and link; None: never, or broken."""
    rows = tables.newest(rows, "kind", "system", "rate", "delay_ms")
    curves = {r["system"]: parse_curve(r["curve"]) for r in rows if r["curve"]}
    if REFERENCE not in curves:
        return {}
    target = curves[REFERENCE][target_step]
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
    return sorted(links, key=lambda place: (float(place[1]), bits(place[0])))


def markdown(rows: Sequence[tables.Row], target_step: int) -> str:
    """Return the table of seconds to the loss, with the times of the first in each column bold."""
    found = seconds_to_loss(rows, target_step)
    links = links_of(rows)
    best = {}
    for place in links:
        times = [t for (_, where), t in found.items() if where == place and t is not None]
        best[place] = min(times, default=None)
    names = [f"{rate}, {delay} ms" for rate, delay in links]
    lines = ["| system | lines | " + " | ".join([*names, "MB a step", "what broke"]) + " |"]
    lines.append("| --- " * (len(links) + 4) + "|")
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = tables.newest([r for r in rows if r["system"] == name], "kind", "rate", "delay_ms")
        cells = []
        for place in links:
            seconds = found.get((name, place))
            text = "" if seconds is None else f"{seconds:.1f}"
            cells.append(f"**{text}**" if text and seconds == best[place] else text or "-")
        sent = [float(r["bytes"]) for r in mine if r["bytes"]]
        cells.append(f"{min(sent) / 1e6:.3f}" if sent else "-")
        cells.append("; ".join(dict.fromkeys(r["broke"] for r in mine if r["broke"])))
        lines.append(f"| {name} | {mine[0]['lines']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(rows: Sequence[tables.Row], target_step: int) -> list[str]:
    """Return a sentence for each link: which system is first, and how far pycomm is from it."""
    found = seconds_to_loss(rows, target_step)
    ours = {peer.name for peer in PEERS if peer.ours}
    sentences = []
    for place in links_of(rows):
        times = {name: t for (name, where), t in found.items() if where == place and t is not None}
        mine = {name: t for name, t in times.items() if name in ours}
        if not mine or len(times) == len(mine):
            continue
        first, own = min(times, key=times.__getitem__), min(mine, key=mine.__getitem__)
        other = min(t for name, t in times.items() if name not in ours)
        where = f"{place[0]}, {place[1]} ms"
        if first in ours:
            sentences.append(f"{where}: {first} is first, {other / times[first]:.2f} times as fast "
                             "as the best of the others.")  # fmt: skip
        else:
            ratio = mine[own] / other
            sentences.append(f"{where}: {first} is first; {own} takes {ratio:.2f} times as long.")
    return sentences
