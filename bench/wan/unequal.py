"""All-reduces over links that differ, against the lower bound, beside equal shares and Gloo.

    python -m pycomm.bench.wan.unequal --rates 20mbit,100mbit,100mbit,100mbit --csv FILE

In a lab (lab.py) whose nodes have these links, "sent/received" where the ways differ, one rank on
each runs the calls in turns (unequal_rank.py): pycomm with the rates declared (PYCOMM_RATE), so
that its shares follow them, the same with equal shares, each exact and coded, with shares by the
rates that the ranks have measured, and Gloo. Medians are
printed as ratios to the bound that docs/networks.md derives, with the bytes of the payload.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.lab.base import Unavailable, wait
from pycomm.bench.wan.lab import WanLab
from pycomm.bench.wan.shape import Shape, bits, seconds
from pycomm.bench.wan.steps import Failed


def ways(rate: str) -> tuple[float, float]:
    """Return the bytes per second that a link sends and receives."""
    send, _, receive = rate.partition("/")
    return bits(send) / 8, bits(receive or send) / 8


def bound(rates: Sequence[str]) -> float:
    """Return the least seconds of an all-reduce, for each byte of a rank's buffer."""
    n = len(rates)
    each = [ways(rate) for rate in rates]
    least = [1 / way for link in each for way in link]
    total = [2 * (n - 1) / sum(link[i] for link in each) for i in range(2)]
    return max(*least, *total)


def measure(lab: WanLab, rates: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each call, and the bytes of a payload.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        file = Path(folder) / "found"
        words = [str(file), ",".join(rates), options.bytes, str(options.repeats), options.codec]
        command = [sys.executable, "-m", "pycomm.bench.wan.unequal_rank", *words]
        status = wait(lab.start(command, env=dict(os.environ), stdout=printed, stderr=printed))
        lab.stop()
        if status != 0 or not file.exists():
            printed.seek(0)
            raise Failed(f"a rank failed:\n{printed.read().decode(errors='replace')}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.wan.unequal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", default="20mbit,100mbit,100mbit,100mbit", help="of each node, comma-separated")
    add("--round-trip", default="20ms", help="between all nodes (20ms)")
    add("--bytes", default="16777216", help="of a rank's buffer of float32 (16777216)")
    add("--codec", default="quant:bits=8", help="of the coded calls (quant:bits=8)")
    add("--repeats", type=int, default=5, help="calls of each kind, in turns (5)")
    add("--csv", default="", help="append the rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.wan.unequal", *argv]))
    rates = options.rates.split(",")
    try:
        least = bound(rates)
        shape = Shape(delay=seconds("round trip", options.round_trip) / 2)
        with WanLab(len(rates), "unlimited", shape=shape, node_rates=dict(enumerate(rates))) as lab:
            found = measure(lab, rates, options)
    except (Failed, ValueError) as error:
        print(f"unequal: {error}", file=sys.stderr)
        return 2
    except Unavailable as error:
        print(f"unequal: the lab cannot be made here: {error}", file=sys.stderr)
        return 2
    print(f"{found['describe']}\ncall                   ms   bound  ratio")
    records = []
    for name, took in found["seconds"].items():
        payload = found["coded bytes" if "coded" in name else "bytes"]
        middle, best = statistics.median(took), least * payload
        print(f"{name:<16} {1e3 * middle:>8.0f} {1e3 * best:>7.0f} {middle / best:>6.2f}")
        row = {"rates": options.rates, "round_trip": options.round_trip, "call": name}
        row |= {"bytes": payload, "ms": f"{1e3 * middle:.1f}", "bound_ms": f"{1e3 * best:.1f}"}
        row |= {"ratio": f"{middle / best:.3f}"}
        records.append({**row, **vars(origin)})
    if options.csv:
        tables.append(Path(options.csv), records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
