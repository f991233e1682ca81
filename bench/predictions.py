"""Planner predictions for one model, over rates and over ranks, as the table of a figure.

    python -m pycomm.bench.predictions --csv bench/results/predictions.csv

is `python -m pycomm.plan sweep 350M --ranks 16 --link 10gbe --compute 300ms --processor gpu`. That
command's own pages and pictures are meant for users' models. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.plan import CODINGS, PROCESSORS, Cluster, Link, of_count
from pycomm.plan.show import describe
from pycomm.plan.sweep import Sweep, sweep

PARAMETERS, SECONDS, RANKS, LINK = 350_000_000, 0.3, 16, "10gbe"


def rows(found: Sweep) -> Iterator[dict[str, Any]]:
    """Yield a row per codec and point; `pays_below` is its crossover in bytes per second."""
    what = {
        "what": describe(found.model, found.cluster),
        "ranks": found.cluster.ranks,
        "rate": found.cluster.slowest.rate,
    }
    for curves in (found.by_rate, found.by_ranks):
        for codec, steps in curves.steps.items():
            for at, step, best in zip(curves.at, steps, curves.best, strict=True):
                yield {
                    "axis": curves.axis,
                    "at": _digits(at),
                    "codec": codec,
                    "step": _digits(step),
                    "advised": int(best == codec),
                    "pays_below": _digits(found.crossovers.get(codec)),
                    **what,
                }


def _digits(value: float | None) -> str:
    """Format six digits, which are the same on every machine."""
    return "" if value is None else f"{value:.6g}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.predictions", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--csv", type=Path, required=True, help="append all rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.predictions", *argv]))
    cluster = Cluster(ranks=RANKS, inter=Link.of(LINK), processor=PROCESSORS["gpu"])
    found = sweep(of_count(PARAMETERS, SECONDS), cluster, list(CODINGS.values()))
    tables.append(options.csv, [row | vars(origin) for row in rows(found)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
