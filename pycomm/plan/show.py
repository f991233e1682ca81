"""Tables on the console."""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.plan.advice import Advice
from pycomm.plan.cluster import Cluster
from pycomm.plan.model import Model
from pycomm.plan.prediction import Prediction
from pycomm.units import format_bytes, format_count, format_rate, format_time

HEAD = ("codec", "algorithm", "step", "exposed", "scaling", "sent", "error")


def row(prediction: Prediction) -> tuple[str, ...]:
    return (
        prediction.codec,
        prediction.algorithm,
        format_time(prediction.step),
        format_time(max(0.0, prediction.exposed)),
        f"{prediction.efficiency * 100:.0f} %",
        format_bytes(prediction.wire_bytes),
        f"{prediction.error:.2g}",
    )


def describe(model: Model, cluster: Cluster) -> str:
    """Return one line that describes what is predicted."""
    link = cluster.slowest
    nodes = f"{cluster.nodes} nodes of {cluster.ranks_per_node}"
    where = f"{cluster.ranks} ranks" + (f" on {nodes}" if cluster.ranks_per_node > 1 else "")
    rate = format_rate(link.rate)
    if link.receive and link.receive != link.rate:
        rate += f" out and {format_rate(link.receive)} in"
    loss = f", {link.loss * 100:.3g} % lost" if link.loss else ""
    return (
        f"{model.name} ({format_count(model.values)} values in {len(model.buckets)} buckets, "
        f"{format_time(model.compute)} alone), {where}, {rate} and "
        f"{format_time(link.latency)} between them{loss}"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", *, words: int = 2
) -> None:
    """Print a table; the first columns hold words, the others numbers."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    if title:
        print(title)
    for cells in [head, *rows]:
        padded = [
            cell.rjust(width) if i >= words else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())


def advice(given: Advice) -> None:
    """Print the advice."""
    if given.compress:
        print(f"use {given.codec}")
    else:
        print("don't compress")
    for reason in given.why:
        print(f"- {reason}")
