"""`python -m pycomm.plan sweep`: tables, JSON, and charts of steps against rate and ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from pycomm.plan import draw, options, show
from pycomm.plan.advice import ERROR
from pycomm.plan.cluster import Cluster
from pycomm.plan.sweep import Curves, Sweep, sweep
from pycomm.plan.units import format_rate, format_time

RANKS = 16  # default number of ranks along rates
COLUMNS = 7  # points that a table shows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.plan sweep",
        description="Predicts steps from 10 Mbit/s to 400 Gbit/s and from 2 to 10,000 ranks.",
    )
    options.add_what(parser, RANKS)
    options.add_json(parser)
    add = parser.add_argument
    add("--most", type=options.count, default=10_000, help="ranks along that axis (10000)")
    page = "write a page with both pictures, which needs no network"
    add("--html", type=options.file, help=page)
    add("--png", type=options.file, help="write both pictures")
    given = parser.parse_args(argv)
    try:
        model, cluster = options.model(given), options.cluster(given, given.ranks)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    limit = ERROR if given.max_error is None else given.max_error
    found = sweep(model, cluster, options.chosen(given), most=given.most, error=limit)
    quiet = str(given.json) == "-"
    if given.json:
        options.write_json(given.json, found.record())
    if not quiet:
        print(show.describe(model, cluster))
        report(found, cluster)
    for path, save in ((given.html, draw.save_html), (given.png, draw.save_png)):
        if path is None:
            continue
        try:
            save(found, path)
        except ImportError as error:
            parser.exit(1, f"{path}: {error}; pip install 'pycomm[bench]'\n")
        if not quiet:
            print(f"written to {path}")
    return 0


def report(found: Sweep, cluster: Cluster) -> None:
    """Print both axes as tables, then the crossovers."""
    rate = format_rate(cluster.slowest.rate)
    table(found.by_rate, f"step by rate, {cluster.ranks} ranks", format_rate)
    table(found.by_ranks, f"step by ranks, {rate}", lambda ranks: f"{ranks:.0f}")
    for line in found.sentences():
        print(f"- {line}")
    print(f"advised: {found.advised()}")


def table(curves: Curves, title: str, spell: Callable[[float], str]) -> None:
    """Print some points of an axis: the first, the last, and as many between as fit a page."""
    count = min(COLUMNS, len(curves.at))
    last = len(curves.at) - 1
    chosen = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    head = ["codec", *(spell(curves.at[i]) for i in chosen)]
    rows = [
        [codec, *(format_time(steps[i]) for i in chosen)] for codec, steps in curves.steps.items()
    ]
    rows.append(["advised", *(curves.best[i] for i in chosen)])
    show.table(head, rows, title, words=1)
