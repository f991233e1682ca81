"""Summary of decisions for people, and the check that all ranks have decided alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

import pycomm
from pycomm import backend, log
from pycomm.errors import WireMismatch
from pycomm.policy.exchange import device_of, gather, gather_json
from pycomm.policy.rules import Decision


def grouped(decisions: Iterable[Decision]) -> dict[tuple[str, str], list[Decision]]:
    """Return decisions by what travels and why."""
    groups: dict[tuple[str, str], list[Decision]] = {}
    for decision in decisions:
        groups.setdefault((decision.form, decision.reason), []).append(decision)
    return groups


def summary(decisions: Iterable[Decision]) -> str:
    """Return one line per codec and reason: the number of parameters, values and bytes."""
    lines = []
    for (codec, reason), members in grouped(decisions).items():
        numel = sum(d.parameter.numel for d in members)
        size = sum(d.encoded_bytes for d in members)
        few = ", ".join(d.parameter.name for d in members[:3]) + (", ..." * (len(members) > 3))
        lines.append(
            f"{codec} ({reason}): {len(members)} parameters, {numel} values in {size} bytes: {few}"
        )
    return "\n".join(lines)


def agree_on_options(options: Sequence[str], *groups: dist.ProcessGroup) -> None:
    """Check that all ranks of a group, or of a mesh, were given the same options; collective.

    They must also run the same version of pycomm.

    Args:
        options: a line for each option, in the same order on all ranks.
        groups: the group; for a mesh the groups along its dimensions, the last one first.

    Raises:
        WireMismatch: options or versions differ; raised on all ranks, with the ranks and the first
            difference.
    """
    everybody = [[f"pycomm {pycomm.__version__}", *options]]
    for group in groups:
        if group.size() == 1:
            continue
        # Compare only after the last gather: a rank that raises earlier would leave others waiting.
        everybody = [theirs for part in gather_json(everybody, group) for theirs in part]
    for rank, theirs in enumerate(everybody):
        if theirs[0] != everybody[0][0]:
            raise WireMismatch(
                f"rank 0 runs {everybody[0][0]}, rank {rank} runs {theirs[0]}; install the same "
                "version on all hosts"
            )
    if any(theirs != everybody[0] for theirs in everybody):
        raise WireMismatch(_difference(everybody))
    for group in groups:
        if group.size() > 1 and backend.find(group, device_of(group)) is None:
            log.begin(group.rank(), f"{group.size()} ranks, by {dist.get_backend(group)}", ())


@contextmanager
def refused_together(*groups: dist.ProcessGroup) -> Iterator[None]:
    """Let all ranks raise if the arguments of one are refused; a block up to `agree_on_options`.

    Args:
        groups: as for `agree_on_options`, which the block calls on ranks without an error.

    Raises:
        WireMismatch: other ranks have no such error, or another one; raised on all ranks.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        agree_on_options([str(error)], *groups)
        raise


def agree(decisions: Sequence[Decision], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of a group have decided alike.

    Every rank must call it: two small all-gathers, the second only after a difference.

    Args:
        decisions: the decisions, in the same order on all ranks.
        group: the ranks.
        device: a device whose tensors the group moves.

    Raises:
        WireMismatch: decisions differ; raised on all ranks, with the ranks and the first
            difference.
    """
    mine = [str(decision) for decision in decisions]
    digests = gather(list(hashlib.sha256("\n".join(mine).encode()).digest()), group, device)
    if any(other != digests[0] for other in digests):
        raise WireMismatch(_difference(gather_json(mine, group, device)))


def _difference(everybody: list[list[str]]) -> str:
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        if theirs == first:
            continue
        here, there = next(
            ((a, b) for a, b in zip(first, theirs, strict=False) if a != b),
            (f"{len(first)} parameters", f"{len(theirs)} parameters"),
        )
        return (
            f"ranks do not compress alike: rank 0 has {here!r}, rank {rank} has {there!r}; "
            "give every rank the same model and the same codec or policy"
        )
    return "ranks do not compress alike"
