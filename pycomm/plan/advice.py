"""Advice from predictions: the codec to use, or none, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycomm.plan import codecs
from pycomm.plan.cluster import Cluster
from pycomm.plan.prediction import Prediction, best_of_each
from pycomm.units import format_bytes, format_rate, format_time

WORTH = 0.05
"""Least share by which a codec must shorten the step: less is below a plan's accuracy."""
CLOSE = 1.05
"""Of codecs whose steps are within this factor, the most accurate one is chosen."""
ALIKE = 1.25
"""Errors within this factor do not tell which of two codecs trains better: the table's first is
taken, and there int4 stands before mxfp4, whose measured losses are worse."""
MOMENTUM = "sign"
"""Codec of the momentum, by default; gradients of a step train worse through it."""
MOMENTUM_LOSS = (
    "on twelve small tasks a loss from 2 % below to 11 % above that of exact gradients "
    "(docs/results.md)"
)
"""What `bench training --suite` has measured of it."""
ERROR = 0.3
"""Relative squared error above which a codec is not advised by default: EDEN's 2 bits pass."""


@dataclass(frozen=True)
class Advice:
    """The recommended codec and algorithm, with reasons."""

    codec: str
    """Name of a codec; "none": do not compress."""
    algorithm: str
    speedup: float
    """Speedup of the step against the best one without a codec."""
    why: tuple[str, ...]

    @property
    def compress(self) -> bool:
        return self.codec != "none"


def advise(cluster: Cluster, predictions: Sequence[Prediction], *, error: float = ERROR) -> Advice:
    """Choose among predictions, of which some must be without a codec.

    Args:
        cluster: the cluster of the predictions.
        predictions: results of :func:`predict`.
        error: largest acceptable relative squared error of a gradient.
    """
    best = best_of_each(sorted(predictions, key=lambda p: p.step))
    exact = next(p for p in best if p.codec == "none")
    allowed = [p for p in best if p.error <= error]
    fastest = min(allowed, key=lambda p: p.step)
    close = [p for p in allowed if p.step <= CLOSE * fastest.step]
    least = min(p.error for p in close)
    table = [*codecs.CODINGS, *(p.codec for p in close)]  # the latter: densities of top-k
    alike = (p for p in close if p.error <= ALIKE * least)
    chosen = min(alike, key=lambda p: table.index(p.codec))
    if chosen.step > (1 - WORTH) * exact.step:
        reasons = (*_why_not(cluster, exact, fastest, best), *_limits(cluster))
        return Advice("none", exact.algorithm, 1.0, reasons)
    speedup = exact.step / chosen.step
    why = [
        f"{chosen.codec} over {chosen.algorithm}: a step of {format_time(chosen.step)} instead of "
        f"{format_time(exact.step)}, {speedup:.2f} times as fast; the gradient's relative squared "
        f"error is {chosen.error:.2g} before feedback"
    ]
    momentum = next((p for p in best if p.codec == MOMENTUM), None)
    if momentum is not None and momentum.step < (1 - WORTH) * chosen.step:
        why.append(
            f"with torch's AdamW or SGD, pycomm.code_optimizer(optimizer, model, {MOMENTUM!r}) "
            f"sends the momentum in place of the gradients: {format_bytes(momentum.wire_bytes)} "
            f"instead of {format_bytes(chosen.wire_bytes)}, a step of about "
            f"{format_time(momentum.step)}, and {MOMENTUM_LOSS}"
        )
    if best[0].error > error:
        why.append(
            f"{best[0].codec} is faster still ({format_time(best[0].step)}) and was passed over: "
            f"its error of {best[0].error:.2g} is above {error:g} (--max-error)"
        )
    return Advice(chosen.codec, chosen.algorithm, speedup, (*why, *_limits(cluster)))


def _limits(cluster: Cluster) -> tuple[str, ...]:
    """Return the limits on throughput other than the link's own rate."""
    link = cluster.slowest
    if cluster.ranks == 1 or link.rate * link.byte <= 1:
        return ()
    return (
        f"TCP on a core moves {format_rate(1 / link.byte)}: the {format_rate(link.rate)} of "
        f"{link.name} change nothing beyond that; where a card moves the bytes, say so by a prefix "
        "(--link dma:100gbit)",
    )


def _why_not(
    cluster: Cluster, exact: Prediction, fastest: Prediction, best: Sequence[Prediction]
) -> tuple[str, ...]:
    """Return the reasons against compression, the decisive one first."""
    if cluster.ranks == 1:
        return ("there is one rank: nothing is exchanged",)
    saved = (1 - fastest.step / exact.step) * 100
    why = [
        f"don't compress: the best codec ({fastest.codec}) would shorten the step by "
        f"{max(0.0, saved):.1f} %, less than the {WORTH * 100:.0f} % that a plan can tell apart"
    ]
    link = cluster.slowest
    if exact.exposed < 2 * WORTH * exact.step:
        fast = exact.communication < 0.1 * exact.compute
        text = "the link is fast enough" if fast else "the step is compute-bound"
        why.append(
            f"{text}: of {format_time(exact.communication)} of communication at "
            f"{format_rate(link.rate)}, {format_time(max(0.0, exact.exposed))} are exposed in a "
            f"step of {format_time(exact.step)}; the rest hides behind backward"
        )
    if exact.latency > 0.5 * exact.communication:
        why.append(
            f"the model is tiny for this link: {exact.latency / exact.communication * 100:.0f} % "
            f"of its communication is latency, which no codec shortens"
        )
    if slower := [p.codec for p in best if p.communication > exact.communication]:
        why.append(
            "codecs take longer than what they save on this link, and do not break even: "
            + ", ".join(slower)
        )
    return tuple(why)
