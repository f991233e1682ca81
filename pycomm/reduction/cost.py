"""Memory of the residuals on a rank, known before any of them is allocated."""

from __future__ import annotations

from collections.abc import Iterable

from pycomm.reduction.reducer import BucketReducer


def residual_bytes(reducer: BucketReducer) -> int:
    """Return the bytes that residuals take on this rank when all of them have been written."""
    residuals = reducer.residuals
    if residuals is None:
        return 0
    parts = [reducer.part(decision) for decision in reducer.decisions.values()]
    form = reducer.rows, reducer.shards
    each = (residuals.bytes_for(p.codec, p.parameter.numel, *form) for p in parts)
    return sum(each) * reducer.kept_alike


def memory_text(reducer: BucketReducer) -> str:
    """Return the memory of the residuals as a line of text; empty if there are none."""
    taken = residual_bytes(reducer)
    if reducer.residuals is None or not taken:
        return ""
    values = sum(decision.parameter.numel for decision in reducer.decisions.values())
    return (
        f"feedback: residuals take up to {taken / 1e6:.3g} MB on each rank, "
        f"{taken / values:.2g} bytes for each of {values} values ({reducer.residuals.rule})"
    )


def sent_bytes(reducer: BucketReducer, names: Iterable[str], ranks: int) -> int:
    """Return the bytes that a rank sends to average these parameters once, at most.

    Payloads with owners go to the owners, and their results to all; sparse ones to all ranks.
    """
    total = 0.0
    for decision in map(reducer.decisions.__getitem__, names):
        gathered = decision.codec.combine == "gather"
        total += decision.encoded_bytes * (ranks - 1) * (1 if gathered else 2 / ranks)
    return round(total)
