"""Sweep of step times over link rates and numbers of ranks, with each codec's crossover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycomm.plan.advice import ERROR, WORTH, advise
from pycomm.plan.cluster import Cluster
from pycomm.plan.codecs import NONE, Coding
from pycomm.plan.model import Model
from pycomm.plan.prediction import best_of_each, predict
from pycomm.plan.units import format_rate

SLOWEST, FASTEST = 10e6 / 8, 400e9 / 8  # bytes per second
RATES = 37  # about eight in each power of ten


def rates() -> list[float]:
    """Return link rates in bytes per second, evenly spaced as logarithms."""
    ratio = (FASTEST / SLOWEST) ** (1 / (RATES - 1))
    return [SLOWEST * ratio**i for i in range(RATES)]


def rank_counts(per_node: int, most: int) -> list[int]:
    """Return numbers of ranks: 2, 4, 8, ... whole nodes, and as many as `most` ranks fill."""
    fit, nodes = max(1, most // per_node), 2
    counts = []
    while nodes < fit:
        counts.append(nodes * per_node)
        nodes *= 2
    return [*counts, fit * per_node]


@dataclass(frozen=True)
class Curves:
    """The shortest step with each codec along one axis."""

    axis: str
    """"rate" in bytes per second, or "ranks\""""
    at: Sequence[float]
    steps: dict[str, list[float]]
    best: list[str]
    """Advice at each point; "none": not to compress."""


@dataclass(frozen=True)
class Sweep:
    model: Model
    cluster: Cluster
    by_rate: Curves
    by_ranks: Curves
    crossovers: dict[str, float | None]
    """Bytes per second below which each codec pays off; None: nowhere in the range."""

    def intervals(self) -> list[tuple[str, float, float]]:
        """Return the advised codecs, each with its range of rates."""
        found: list[tuple[str, float, float]] = []
        for codec, rate in zip(self.by_rate.best, self.by_rate.at, strict=True):
            if found and found[-1][0] == codec:
                found[-1] = (codec, found[-1][1], rate)
            else:
                found.append((codec, found[-1][2] if found else rate, rate))
        return found

    def sentences(self) -> list[str]:
        """Return the crossovers as sentences."""
        lines = []
        for codec, rate in self.crossovers.items():
            if rate is None:
                lines.append(f"{codec} pays nowhere from 10 Mbit/s to 400 Gbit/s")
            elif rate >= FASTEST:
                lines.append(f"{codec} pays at every rate up to 400 Gbit/s")
            else:
                lines.append(f"{codec} pays below {format_rate(rate)}")
        return lines

    def advised(self) -> str:
        """Return the intervals as a sentence."""
        return ", ".join(
            f"{'no codec' if codec == NONE.name else codec} to {format_rate(high)}"
            for codec, _, high in self.intervals()
        )

    def record(self) -> dict[str, Any]:
        """Return all results, for JSON."""
        curves = {
            curves.axis: {"at": list(curves.at), "steps": curves.steps, "best": curves.best}
            for curves in (self.by_rate, self.by_ranks)
        }
        return {
            "model": self.model.name,
            "ranks": self.cluster.ranks,
            "rate": self.cluster.inter.rate,
            **curves,
            "crossovers": self.crossovers,
        }


def at_rate(cluster: Cluster, rate: float) -> Cluster:
    """Return the cluster with another rate between nodes, or between ranks of a single node."""
    if cluster.nodes == 1:
        return replace(cluster, intra=replace(cluster.intra, rate=rate))
    return replace(cluster, inter=replace(cluster.inter, rate=rate, receive=0.0))


def with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with more or fewer such nodes, on one machine if these share one."""
    if cluster.ranks_per_machine <= cluster.ranks_per_node:
        return replace(cluster, ranks=ranks)
    cores = cluster.cores * cluster.ranks_per_machine
    return replace(cluster, ranks=ranks, cores=cores / ranks, ranks_per_machine=ranks)


def sweep(
    model: Model,
    cluster: Cluster,
    codings: Sequence[Coding],
    *,
    most: int = 10_000,
    error: float = ERROR,
) -> Sweep:
    """Predict along both axes, by formulas.

    Args:
        model: what is trained.
        cluster: values held constant: its ranks along rates, its rate along ranks.
        codings: codecs, NONE among them.
        most: largest number of ranks.
        error: largest relative squared error of an advised codec.
    """
    along_rates = [at_rate(cluster, rate) for rate in rates()]
    counts = rank_counts(cluster.ranks_per_node, most)
    along_ranks = [with_ranks(cluster, count) for count in counts]
    by_rate = _curves("rate", rates(), model, along_rates, codings, error)
    by_ranks = _curves("ranks", counts, model, along_ranks, codings, error)
    crossovers = {
        coding.name: crossover(model, cluster, coding, by_rate)
        for coding in codings
        if coding.name in by_rate.steps and not coding.exact
    }
    return Sweep(model, cluster, by_rate, by_ranks, crossovers)


def _curves(
    axis: str,
    at: Sequence[float],
    model: Model,
    clusters: Sequence[Cluster],
    codings: Sequence[Coding],
    error: float,
) -> Curves:
    steps: dict[str, list[float]] = {}
    best = []
    for cluster in clusters:
        predictions = predict(model, cluster, codings)
        for prediction in best_of_each(predictions):
            steps.setdefault(prediction.codec, []).append(prediction.step)
        best.append(advise(model, cluster, predictions, error=error).codec)
    return Curves(axis, at, steps, best)


def gain(model: Model, cluster: Cluster, coding: Coding) -> float:
    """Return the share of the step that a codec saves, against the one without."""
    found = best_of_each(predict(model, cluster, (NONE, coding)))
    steps = {prediction.codec: prediction.step for prediction in found}
    return 1 - steps[coding.name] / steps[NONE.name]


def crossover(model: Model, cluster: Cluster, coding: Coding, by_rate: Curves) -> float | None:
    """Return the highest rate at which a codec shortens the step by more than a plan's accuracy.

    None if it does at no rate of the sweep.
    """
    pairs = zip(by_rate.steps[coding.name], by_rate.steps[NONE.name], strict=True)
    pays = [1 - coded / exact > WORTH for coded, exact in pairs]
    if not any(pays):
        return None
    last = max(i for i, yes in enumerate(pays) if yes)
    if last == len(pays) - 1:
        return FASTEST
    low, high = by_rate.at[last], by_rate.at[last + 1]
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        if gain(model, at_rate(cluster, middle), coding) > WORTH:
            low = middle
        else:
            high = middle
    return low
