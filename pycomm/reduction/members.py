"""Change of members: what the members of a group tell each other before they go on as one.

The members of an elastic group (`pycomm.elastic`) change between two steps. Some have trained
together, others are new. They exchange where each stands; the one that is furthest hands its common
state to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from pycomm.elastic.contents import mapped, plain_numbers, read, unreadable, write
from pycomm.errors import Error, WireMismatch
from pycomm.policy.exchange import bytes_of, gather


@dataclass(frozen=True)
class MemberState:
    """Where a member of the group stands before its first step with the others."""

    step: int
    """Steps that it has taken; 0: it is new, and has no residuals."""
    agreed: bool
    """It has been compared with exactly these members, when its state was made."""
    rebuilds: bool
    """DDP makes its buckets anew after the next backward, in a collective of its own."""
    rank: int
    """Its rank when its residuals were written; -1: it is new."""
    ranks: int
    """The number of ranks then."""


def exchange_states(
    mine: MemberState, group: dist.ProcessGroup, device: torch.device
) -> list[MemberState]:
    """Return where all members stand, in rank order; collective.

    Raises:
        WireMismatch: some models are about to make new buckets and others are not; on all ranks.
    """
    rows = gather(list(map(int, astuple(mine))), group, device)
    standings = [
        MemberState(int(step), bool(agreed), bool(rebuilds), int(rank), int(ranks))
        for step, agreed, rebuilds, rank, ranks in rows
    ]
    new = [str(rank) for rank, standing in enumerate(standings) if standing.rebuilds]
    if 0 < len(new) < len(standings):
        raise WireMismatch(
            f"rank {group.rank()}: the models do not have the same buckets: DDP has made those of "
            f"rank {', '.join(new)} in its constructor, and those of the others anew after their "
            "first backward. After a member has joined, wrap the module in a new "
            "DistributedDataParallel on all ranks, call pycomm.compress again, and adopt_state "
            "with the former state, or with None on the new member"
        )
    return standings


def source(standings: Sequence[MemberState]) -> int:
    """Return the rank whose common state all take over: the first of those that are furthest."""
    steps = [standing.step for standing in standings]
    return steps.index(max(steps))


def in_place(standings: Sequence[MemberState]) -> bool:
    """Return whether all have the ranks that they had: then values have the same owners."""
    ranks = len(standings)
    return all((one.rank, one.ranks) == (rank, ranks) for rank, one in enumerate(standings))


def broadcast_object(thing: Any, root: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return one rank's object on all ranks; collective.

    It takes groups that torch has no record of, too, as those of torchft are.

    Args:
        thing: of tensors and plain Python types, since no other is read; used on the rank `root`
            only. Numbers of numpy become Python's.
        root: rank in the group.
        group: the ranks.
        device: a device whose tensors the group moves.

    Raises:
        Error: the object has an entry of another type, which the text names; on all ranks, before
            the object is sent.
    """
    if group.size() == 1:
        return thing
    written, problem = b"\0", ""
    if group.rank() == root:
        thing = plain_numbers(thing)
        problem = unreadable(_without_values(thing), lambda what: read(write(what)))
        written = problem.encode() if problem else write(thing)
    content = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    head = torch.tensor([content.numel(), bool(problem)], dtype=torch.int64, device="cpu")
    head = head.to(device)
    group.broadcast(head, root).wait()
    size, refused = head.tolist()
    if group.rank() != root:
        content = torch.empty(size, dtype=torch.uint8, device="cpu")
    content = content.to(device)
    group.broadcast(content, root).wait()
    if group.rank() == root and not refused:
        return thing
    received = bytes_of(content.cpu())
    if refused:
        raise Error(
            f"rank {group.rank()}: rank {root} cannot send its state, in which other ranks read "
            f"tensors, numbers, texts and containers only: {received.decode()}. Put one of these "
            "in its place, or give its class to torch.serialization.add_safe_globals on all ranks"
        )
    return read(received)


def _without_values(thing: Any) -> Any:
    """Return a state with empty tensors in the place of its tensors."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    empty = torch.empty(0, dtype=torch.float32, device="cpu")
    return mapped(thing, lambda entry: empty if type(entry) in kinds else entry)


def compare_bucket(names: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all members have the same parameters in a bucket; collective.

    Raises:
        WireMismatch: they have not; raised on all ranks.
    """
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    rows = gather([int.from_bytes(digest[:6], "little")], group, device)
    others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise WireMismatch(
            f"rank {group.rank()}: rank {', '.join(others)} has other parameters in a bucket than "
            f"rank 0; here it begins with {names[0]}. After the members have changed, wrap the "
            "module in a new DistributedDataParallel on all ranks"
        )
