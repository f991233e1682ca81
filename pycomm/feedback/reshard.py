"""Residuals for another number of ranks, so that what all ranks together owe stays the same.

What is conserved is what is owed to the average gradient: the sum of the owners' residuals plus the
mean of the workers'. So the average of all that was sent, plus this, is still the average of all
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycomm.feedback import storage
from pycomm.feedback.rule import Feedback

Saved = Mapping[str, Mapping[str, Any]]


def sources(rule: Feedback, before: int, rank: int, ranks: int) -> list[int]:
    """Return whose of `before` ranks' residuals rank `rank` of `ranks` takes over.

    Each is taken once. With ef21 every rank needs one, to know the mean.
    """
    mine = list(range(rank, before, ranks))
    return mine or ([rank % before] if rule.kind == "ef21" else [])


def reshard(rule: Feedback, saved: Sequence[Saved], before: int, ranks: int) -> dict[str, Any]:
    """Return the residuals of a rank that takes over those of some ranks.

    Args:
        rule: the kind of feedback.
        saved: what `Residuals.state_dict` has returned on the ranks that `sources` names.
        before: number of ranks that have saved.
        ranks: number of ranks that go on.

    Raises:
        ValueError: they are of a reduce-scatter, whose rows belong to ranks.
    """
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in saved for name in state):
        entries = [state[name] for state in saved if name in state]
        numel, rows, _, last_step = entries[0]["about"]
        if rows > 1:
            raise ValueError(
                f"feedback: {name} was saved by {before} ranks that share it (FSDP); continue with "
                f"as many, or without its residuals"
            )
        about = (numel, rows, "", last_step)
        if rule.kind == "ef21":
            # All ranks know this much of the mean gradient: say that each of theirs is this.
            mean = entries[0]["mean"].float().clone()
            result[name] = {"mean": mean, "worker": mean.clone(), "about": about}
        else:
            result[name] = _moved(entries, numel, before, ranks) | {"about": about}
        if "worker" in result[name]:
            result[name]["owner"] = torch.zeros_like(result[name]["worker"])
    return result


def _moved(
    entries: Sequence[Mapping[str, Any]], numel: int, before: int, ranks: int
) -> dict[str, torch.Tensor]:
    """A worker's error counts 1/ranks in the average, an owner's once."""
    share = ranks / before
    moved: dict[str, torch.Tensor] = {}
    for role, to, weight in (
        ("worker", "worker", share),
        ("owner", "worker", float(ranks)),
        ("momentum", "momentum", share),
    ):
        for entry in entries:
            if role in entry:
                values = storage.load(entry[role], numel) * weight
                moved[to] = moved[to] + values if to in moved else values
    return moved
