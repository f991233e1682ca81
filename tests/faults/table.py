"""Error latency by fault x transport x op x phase, and whether survivors name the failed rank.

pycomm is measured beside Gloo, with the same process groups of torch.

python -m tests.faults.table [--times 5] [--csv bench/results/faults-cpu.csv]

This takes about seven minutes; without network namespaces the rows of cut networks are omitted.
Only pycomm has codecs; Gloo has no shared memory.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pycomm.bench.common.harness import Origin
from pycomm.bench.netlab import LabUnavailable, Netlab
from tests.faults.injection.case import NETWORK, Call, Case
from tests.faults.injection.judge import blamed, latest, survivors
from tests.faults.injection.play import Played, lab_of, play

RANKS = 3
NUMEL = 50_000
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
FAULTS = ("kill", "stop", "raise", "_exit")
WORLDS = (("pycomm", "shm"), ("pycomm", "tcp"), ("gloo", "tcp"))
CODEC = "quant"


def cells() -> Iterator[Case]:
    """Yield every cell as a case whose number and moment are still to be drawn."""

    def cell(
        world: str, transport: str, fault: str, phase: str, op: str,
        *, codec: str = "", async_op: bool = False,
    ) -> Case:  # fmt: skip
        call = Call(op, NUMEL, codec)
        return Case(0, 0, world, transport, RANKS, 1, fault, phase, (call,), async_op, 0.0, 0.0)

    for world, transport in WORLDS:
        for fault in FAULTS:
            for op in OPS:
                yield cell(world, transport, fault, "steady", op)
            yield cell(world, transport, fault, "steady", "all_reduce", async_op=True)
        for fault in ("kill", "stop"):
            for phase in ("init", "split", "shutdown"):
                yield cell(world, transport, fault, phase, "all_reduce")
        for fault in ("down", "drop") if transport == "tcp" else ():
            for op in ("all_reduce", "send_recv"):
                yield cell(world, transport, fault, "steady", op)
    for transport in ("shm", "tcp"):
        for fault in FAULTS:
            yield cell("core", transport, fault, "steady", "all_reduce", codec=CODEC)


def drawn(cell: Case, seed: int, number: int) -> Case:
    """Return the cell's case of that number, with a random victim and moment."""
    rng = random.Random(f"{seed}/{number}/{cell}")
    span = {"init": 0.01, "split": 0.01, "steady": 0.02, "shutdown": 0.002}[cell.phase]
    fields = {**cell.__dict__, "seed": seed, "number": number}
    return Case(**{**fields, "victim": rng.randrange(RANKS), "delay": rng.uniform(0, span)})


def measured(cell: Case, times: int, seed: int, lab: Netlab | None) -> dict[str, object]:
    """Play `times` cases of a cell; return its row. Libraries get the transport by environment."""
    os.environ["PYCOMM_TRANSPORT"] = cell.transport
    os.environ["GLOO_SOCKET_IFNAME"] = lab.interface if lab else "lo"
    played = [play(drawn(cell, seed, number), lab) for number in range(times)]
    seconds = [s for s in map(latest, played) if s is not None]
    if any(s < 0 for s in seconds):
        raise RuntimeError(f"{cell}: an error before the fault: {played[0].said}")
    errors, named = 0, 0
    for one in played:
        e, n = _told(one)
        errors, named = errors + e, named + n
    late = cell.phase in ("init", "split")
    return {
        "world": cell.world, "transport": cell.transport, "fault": cell.fault,
        "phase": cell.phase, "op": cell.calls[0].op, "codec": cell.calls[0].codec,
        "mode": "async" if cell.async_op else "sync", "ranks": RANKS, "times": times,
        "deadline_s": cell.rendezvous if late else cell.timeout,
        "p50_s": f"{statistics.median(seconds):.4f}" if seconds else "",
        "max_s": f"{max(seconds):.4f}" if seconds else "",
        "errors": errors, "named": named, "hung": sum(bool(one.hung) for one in played),
    }  # fmt: skip


def _told(played: Played) -> tuple[int, int]:
    """Count survivors that got an error, and errors that blame the right rank."""
    errors = named = 0
    for rank in survivors(played.case):
        if rank == played.case.victim:  # a rank that is cut off can only name the others
            continue
        over = played.word(rank, "over")
        if over and over.get("error"):
            errors += 1
            named += played.case.victim in blamed(over["text"])
    return errors, named


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write the rows so far, so that an interrupted run keeps its part."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def summary(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the table of docs/reliability.md: a line per fault and phase, over all operations."""
    kinds = {(r["world"], r["transport"], "coded" if r["codec"] else ""): None for r in rows}
    head = [f"{'pycomm' if w == 'core' else w} {t} {c}".strip() for w, t, c in kinds]
    lines = [f"| fault, phase | {' | '.join(head)} |", "| --- " * (1 + len(head)) + "|"]
    for fault, phase in {(r["fault"], r["phase"]): None for r in rows}:
        cells = []
        for world, transport, coded in kinds:
            here = [
                r for r in rows
                if (r["world"], r["transport"], r["fault"], r["phase"])
                == (world, transport, fault, phase) and bool(r["codec"]) == bool(coded)
            ]  # fmt: skip
            p50 = [float(str(r["p50_s"])) * 1e3 for r in here if r["p50_s"]]
            most = [float(str(r["max_s"])) * 1e3 for r in here if r["max_s"]]
            errors, named = (sum(int(str(r[k])) for r in here) for k in ("errors", "named"))
            hung = sum(int(str(r["hung"])) for r in here)
            text = f"{statistics.median(p50):.0f} / {max(most):.0f}" if p50 else "-"
            cells.append(f"{text}, {named} of {errors}{f', {hung} hung' if hung else ''}")
            if not here:
                cells[-1] = ""
        lines.append(f"| {fault}, {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="cases of each cell")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="write the table here")
    parser.add_argument("--only", default="", help="cells of these words alone: gloo,kill")
    parser.add_argument("--summary", type=Path, help="print the table of this CSV in Markdown")
    args = parser.parse_args(argv)
    if args.summary:
        with args.summary.open() as file:
            print(summary(list(csv.DictReader(file))))
        return 0
    import torch.distributed  # noqa: F401 - once, here: the ranks are forked

    command = f"python -m tests.faults.table --times {args.times} --seed {args.seed}"
    command += f" --only {args.only}" if args.only else ""
    words = {word for word in args.only.split(",") if word}
    start, rows, lab = time.monotonic(), [], None
    print(f"{'':28}{'op':<16}{'p50 ms':>9}{'max ms':>9}  errors  named  hung")
    for cell in cells():
        if not words <= {cell.world, cell.transport, cell.fault, cell.phase, cell.calls[0].op}:
            continue
        if cell.fault in NETWORK and lab is None:
            try:
                lab = lab_of(RANKS)
            except LabUnavailable as error:
                print(f"{cell.world} {cell.fault}: no network namespaces: {error}")
                continue
        own = lab if cell.fault in NETWORK else None
        row = {**measured(cell, args.times, args.seed, own), **asdict(Origin.here(command))}
        rows.append(row)
        if args.csv:
            write(args.csv, rows)
        p50, most = (
            f"{float(str(row[k])) * 1e3:.1f}" if row[k] else "-" for k in ("p50_s", "max_s")
        )
        print(
            f"{cell.world:<7}{cell.transport:<5}{cell.fault:<7}{cell.phase:<9}"
            f"{cell.calls[0].op + (' async' if cell.async_op else ''):<16}{p50:>9}{most:>9}"
            f"{row['errors']:>8}{row['named']:>7}{row['hung']:>6}",
            flush=True,
        )
    print(f"{len(rows)} cells in {time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
