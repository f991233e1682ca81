"""Resharding of residuals for another number of ranks.

It preserves the total correction of the average gradient: the sum of the owners' residuals plus the
mean of the workers' residuals. So the average of all payloads, plus this correction, remains the
average of all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pycomm.feedback import storage
from pycomm.feedback.residual import RESHARDED, Span

Saved = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Cut:
    """The sharding of a parameter by rows of its first dimension, equal numbers on all ranks.

    The last ranks have fewer rows, or none, and are padded with zeros (FSDP2's padded shards). So
    the shards in the order of ranks are the parameter, followed by zeros.
    """

    shape: tuple[int, ...]
    ranks: int

    def numel(self) -> int:
        """Return the number of values in one rank's shard, with padding."""
        first, rest = (self.shape or (1,))[0], torch.Size(self.shape[1:]).numel()
        return -(-first // self.ranks) * rest


def sources(before: int, rank: int, ranks: int) -> list[int]:
    """Return the ranks, of `before`, whose residuals rank `rank` of `ranks` takes over.

    Each old rank's residuals are taken once.
    """
    return list(range(rank, before, ranks))


def reshard(
    saved: Sequence[Saved],
    before: int,
    ranks: int,
    cuts: Mapping[str, Cut] | None = None,
) -> dict[str, Any]:
    """Return the residuals of a rank that takes over those of other ranks.

    Args:
        saved: results of `Residuals.state_dict` on the ranks given by `sources`.
        before: number of ranks that saved.
        ranks: number of ranks that continue.
        cuts: by name, how these shard the parameters of a reduce-scatter.

    Raises:
        ValueError: a parameter is not sharded by rows, or has another shape.
    """
    cuts = cuts or {}
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in saved for name in state):
        entries = [state[name] for state in saved if name in state]
        numel, rows, _, last_step = entries[0]["about"]
        cut = cuts.get(name)
        if rows > 1 or cut is not None:
            _check_cut(name, numel, rows, before, cut)
        form = (numel, rows) if cut is None else (cut.numel(), ranks)
        about = (*form, RESHARDED, last_step)
        moved = _moved(entries, before, ranks)
        if cut is not None:
            # In shards of another size, in the same order, padded with zeros.
            total, size = torch.Size(cut.shape).numel(), cut.ranks * cut.numel()
            moved = {role: F.pad(x[:total], (0, size - total)) for role, x in moved.items()}
        if "worker" in moved and about[1] == 1:
            moved["owner"] = torch.zeros_like(moved["worker"])
        spans = {role: (0, about[0]) for role in moved}
        result[name] = moved | {"about": about, "spans": spans}
    return result


def _check_cut(name: str, numel: int, rows: int, before: int, cut: Cut | None) -> None:
    reason = ""
    if cut is None:
        reason = "not all of these ranks have whole rows of it"
    elif (numel, rows) != (Cut(cut.shape, before).numel(), before):
        reason = f"it had {rows} x {numel} values, not those of a parameter of {list(cut.shape)}"
    if reason:
        raise ValueError(
            f"feedback: {name} was saved by {before} ranks that share it (FSDP), and {reason}; "
            "continue with as many, or without its residuals"
        )


def _moved(
    entries: Sequence[Mapping[str, Any]], before: int, ranks: int
) -> dict[str, torch.Tensor]:
    """Sum and rescale residuals: a worker's counts 1/ranks in the average, an owner's once."""
    share = ranks / before
    moved: dict[str, torch.Tensor] = {}
    for role, to, weight in (
        ("worker", "worker", share),
        ("owner", "worker", float(ranks)),
        ("momentum", "momentum", share),
    ):
        for entry in entries:
            if role in entry:
                numel, rows, *_ = entry["about"]
                held = entry[role], numel, 1 if role == "owner" else rows, entry["spans"][role]
                values = _load(*held) * weight
                moved[to] = moved[to] + values if to in moved else values
    return moved


def _load(stored: torch.Tensor, numel: int, rows: int, span: Span) -> torch.Tensor:
    """Return stored rows as float32 [rows * numel], with zeros for values outside of the span."""
    begin, end = span
    held = end - begin
    parts = [storage.part(stored, held, row, 0, held) for row in range(rows)]
    loaded = [F.pad(storage.load(part, held), (begin, numel - end)) for part in parts]
    return torch.cat(loaded)
