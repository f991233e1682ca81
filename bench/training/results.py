"""Results derived from the losses of `time_to_loss`.

The rows are of two kinds: `loss` is one training, whose `curve` has the loss at every evaluation;
`step` is steps on a link.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pycomm.bench.common.harness import Row
from pycomm.bench.common.tables import parse_curve
from pycomm.bench.training.methods import METHODS, Method

RANKS = 2
EXACT = next(method for method in METHODS if method.label == "pycomm, exact")
EXACT_SGD = next(method for method in METHODS if method.label == "pycomm, exact SGD")


def demo_table(
    rows: Iterable[Mapping[str, Any]], held_back: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """Return the demo's rows as text, header first; each step is compared with the first one.

    Args:
        rows: of the demo's table.
        held_back: the runs whose speed-up means nothing.
    """
    found = [("run", "step", "wire per step", "held-out loss", "speed-up")]
    first = 0.0
    for row in rows:
        seconds, sent, loss = (float(row[c]) for c in ("step_seconds", "wire_bytes", "loss"))
        first = first or seconds
        gain = "held back" if row["run"] in held_back else f"{first / seconds:.2f} x"
        step = f"{seconds * 1e3:.0f} ms"
        found.append((row["run"], step, f"{sent / 1e6:.2f} MB", f"{loss:.4f}", gain))
    return found


def describe(kind: str, model: str, count: int, method: Method, ranks: int = RANKS) -> Row:
    """Return a row without measurements, of a model with so many parameters."""
    return Row(
        kind=kind,
        op="training",
        backend=method.backend,
        ranks=ranks,
        size=4 * count,
        count=count,
        type="float32",
        codec=method.codec or method.momentum or method.local.get("codec", "none"),
        model=model,
        parameters=count,
        method=method.label,
        hook=method.hook,
    )


def steps_to_loss(curves: Sequence[Mapping[Any, float]], target: float) -> float | None:
    """Return the steps until the mean curve reaches the target, interpolated; None: never."""
    places = sorted(curves[0])
    means = [statistics.fmean(curve[step] for curve in curves) for step in places]
    for (a, high), (b, low) in pairwise(zip(places, means, strict=True)):
        if low <= target:
            return a + (b - a) * (high - target) / (high - low) if high > target else float(a)
    return None


def pairs(
    method: str,
    model: str,
    rows: Iterable[Row],
    ranks: int = RANKS,
    *,
    kind: str = "loss",
    exact: str = "",
) -> list[tuple[Row, Row]]:
    """Return a method's trainings, one per seed, each with the exact one of the same seed.

    Of repeated trainings the last counts.
    """
    found = [r for r in rows if (r.kind, r.model, r.ranks) == (kind, model, ranks)]
    by_sgd = any(one.label == method and one.sgd for one in METHODS)
    exact = exact or (EXACT_SGD if by_sgd else EXACT).label
    mine, theirs = ({r.seed: r for r in found if r.method == one} for one in (method, exact))
    return [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]


def changes(method: str, model: str, rows: Iterable[Row], ranks: int = RANKS) -> list[float]:
    """Return by seed the relative change of the loss at the schedule's end against the exact run.

    Both losses are on the same held-out text: if one was taken on less, the curves are compared.
    """
    return [
        loss(mine) / loss(exact) - 1
        if mine.windows == exact.windows
        else curve_end(mine) / curve_end(exact) - 1
        for mine, exact in pairs(method, model, rows, ranks)
    ]


def steps_to_exact(method: str, model: str, rows: Sequence[Row]) -> float | None:
    """Return the steps until a method's mean loss is that of the exact runs at their end.

    These are from the curves, which use less text than the final loss. None: it never is.
    """
    trained = pairs(method, model, rows)
    target = statistics.fmean(curve_end(exact) for _, exact in trained)
    return steps_to_loss([parse_curve(mine.curve) for mine, _ in trained], target)


def loss(row: Row) -> float:
    assert row.loss is not None
    return row.loss


def curve_end(row: Row) -> float:
    """Return the curve's loss at the end of the schedule."""
    return parse_curve(row.curve)[row.steps or 0]
