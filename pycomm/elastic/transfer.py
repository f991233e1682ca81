"""Hand-over: what a new member needs, from a member that has it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from pycomm import backend
from pycomm.arguments import typed, whole
from pycomm.elastic.chain import TRANSFERS, Receiver, Sender, receive, send
from pycomm.elastic.contents import Contents, form
from pycomm.errors import Error, PeerLost, Timeout, WireMismatch
from pycomm.policy.exchange import gather, gather_json, host


def hand_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    has: bool,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = 4 << 20,
) -> int | None:
    """Give the members that are new the model and the optimizer of one that has them; collective.

    All ranks of the group call it, with models that have the same names, shapes and dtypes. One
    rank that has the state sends it to the first new one, which passes it on to the next while it
    comes, and so on: each link carries the state once. The sender is the rank with the state that
    has the most new ones on its own host, then on its own node of a hierarchical group, then the
    lowest; new ones on one host follow each other. The other ranks that have the state return after
    a small exchange, and in their next collective they wait for the others: the group's timeout has
    to allow for that.

    What arrives has the same bits: parameters, persistent buffers, what modules return as
    ``get_extra_state``, and the optimizer's ``state_dict()`` with its groups' options. The new
    member's optimizer needs no state of its own before. Residuals of compressed gradients stay
    where they are: a new member owes nothing (`pycomm.CompressionState.adopt_state`).

    Values are written at the end, when everything has arrived. If it raises before, the new
    member's model and optimizer are unchanged; until then it needs memory of the host for the state
    once more. Only an error of the model's or optimizer's own code that takes the state over
    (``load_state_dict``, ``set_extra_state``) can leave it half written.

    Members read from each other containers, numbers, texts and tensors, and objects of the classes
    that were given to ``torch.serialization.add_safe_globals``; a state with others is refused on
    all ranks before it is sent.

    Args:
        model: the model, wrapped or not. Its tensors may have any dtype, device and strides, but
            must be dense and whole: one in `fully_shard` is for `torch.distributed.checkpoint`.
        optimizer: the optimizer of parameters of this model; None: there is none.
        has: this rank has the state. A rank that has not is new.
        group: the members, of any backend with sends and receives; None: the default group.
        chunk_bytes: size of the messages, in bytes, at least 4096; the same on all ranks. Three of
            them have to pass a link within the group's timeout.

    Returns:
        The rank that has sent its state; None if no member was new.

    Raises:
        TypeError, ValueError: bad arguments.
        WireMismatch: models, optimizers or arguments differ; on all ranks, before a tensor is sent.
        Error: no rank has the state; a rank's model cannot be handed over (on all ranks); or the
            transfer has failed with another backend.
        PeerLost: a rank is gone. With backends other than "pycomm", the rank after it may hear of
            it as `Error`.
        Timeout: a rank did not come, or the next chunk did not, within the group's timeout.

    Example:
        >>> pycomm.elastic.reconfigure(3, handles)  # doctest: +SKIP
        >>> pycomm.elastic.hand_over(net, optimizer, has=step > 0)  # doctest: +SKIP
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
    """
    typed("model", model, nn.Module)
    typed("optimizer", optimizer, torch.optim.Optimizer, None)
    typed("has", has, bool)
    chunk_bytes = whole("chunk_bytes", chunk_bytes, 4096)
    contents = Contents(model, optimizer)
    packed = contents.pack() if has and not contents.problem else (b"", [], [])
    contents.lines.append(f"chunk_bytes={chunk_bytes}")

    group = group or c10d._get_default_group()
    device = _device(group, contents.tensors)
    members = _meet(contents, has, group, device)
    new = [rank for rank, member in enumerate(members) if not member.has]
    if not new:
        return None
    chain = order(members)
    if group.rank() not in chain:
        return chain[0]
    place, transfer = chain.index(group.rank()), members[chain[0]].transfer
    to = Sender(group, chain[place + 1], device, transfer) if place + 1 < len(chain) else None
    try:
        if place == 0:
            assert to is not None
            send(to, contents.tensors, packed, chunk_bytes)
            return chain[0]
        receiver = Receiver(group, chain[place - 1], device, transfer, to)
        arrived = receive(receiver, list(map(form, contents.tensors)), chunk_bytes)
    except RuntimeError as error:
        raise _told(error, chain, place) from error
    contents.take(*arrived)
    return chain[0]


# ------------------------------------------------------------------ who sends to whom


@dataclass(frozen=True)
class Member:
    """What a rank tells the others before the transfer, as numbers that fit into float64."""

    has: bool
    problem: bool
    digest: int
    """Digest of the content description."""
    host: int
    """Digest of the name of its host."""
    node: int
    """Its node in a hierarchical group; -1: the group has no nodes."""
    transfer: int = 0
    """The number of the transfer if this rank sends."""


def order(members: Sequence[Member]) -> list[int]:
    """Return the chain: the rank that sends, then the new ones, neighbours next to each other."""
    new = [rank for rank, member in enumerate(members) if not member.has]

    def near(rank: int) -> tuple[int, int]:
        mine = members[rank]
        hosts = sum(members[n].host == mine.host for n in new)
        nodes = sum(members[n].node == mine.node for n in new)
        return -hosts, -nodes

    source = min((r for r, member in enumerate(members) if member.has), key=lambda r: (near(r), r))
    mine = members[source]
    hosts = [member.host for member in members]
    nodes = [member.node for member in members]

    def distance(rank: int) -> tuple[bool, bool, int, int, int]:
        one = members[rank]
        # A host comes after that of the first rank on it, so its ranks stay together.
        same = one.host == mine.host
        near = same or one.node == mine.node
        return not same, not near, nodes.index(one.node), hosts.index(one.host), rank

    return [source, *sorted(new, key=distance)]


def _meet(
    contents: Contents, has: bool, group: dist.ProcessGroup, device: torch.device
) -> list[Member]:
    """Return what all members have, in rank order, after they have been compared; collective."""
    ours = backend.find(group)
    levels = ours.levels if ours is not None else []
    rank = group.rank()
    mine = Member(
        has,
        bool(contents.problem),
        _digest("\n".join(contents.lines)),
        _digest(host()),
        levels[rank] if levels else -1,
        secrets.randbelow(TRANSFERS),
    )
    rows = gather(list(map(int, astuple(mine))), group, device)
    members = [
        Member(bool(has), bool(problem), *map(int, numbers)) for has, problem, *numbers in rows
    ]
    refusing = [r for r, member in enumerate(members) if member.problem]
    if refusing:
        texts = gather_json(contents.problem, group, device)
        raise Error(
            f"rank {rank}: rank {refusing[0]} cannot take part in the hand-over: "
            f"{texts[refusing[0]]}"
        )
    if any(member.digest != members[0].digest for member in members):
        texts = gather_json(contents.lines, group, device)
        other = next(r for r, text in enumerate(texts) if text != texts[0])
        pairs = zip(texts[0], texts[other], strict=False)
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise WireMismatch(
            f"rank {rank}: the members cannot hand over their state: rank 0 has {first!r}, rank "
            f"{other} has {second!r}. Nothing was sent. Make the same model and optimizer on all "
            "ranks, and pass the same arguments"
        )
    if not any(member.has for member in members):
        raise Error(
            f"rank {rank}: no rank has the state (has=False on all {len(members)}): load a "
            "checkpoint on one, and pass has=True there"
        )
    return members


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def _device(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return a device whose tensors the group moves: the CPU if it does, else the model's."""
    cpu = torch.device("cpu")
    try:
        group._get_backend(cpu)
    except RuntimeError:
        return next((tensor.device for tensor in tensors), cpu)
    return cpu


def _told(error: RuntimeError, chain: Sequence[int], place: int) -> Error:
    """Return the error of a transfer that failed, with what to do."""
    rank = chain[place]
    others = []
    if place > 0:
        others.append(f"rank {chain[place - 1]}, which sends to it")
    if place + 1 < len(chain):
        others.append(f"rank {chain[place + 1]}, to which it sends")
    text = (
        f"rank {rank}: the hand-over of rank {chain[0]}'s state has failed here: {error}. Its "
        f"neighbours are {' and '.join(others)}. Its model and optimizer are unchanged. Form the "
        "group without the ranks that are gone, and call hand_over again on all"
    )
    if isinstance(error, PeerLost):
        return PeerLost(text, error.rank, error.ranks)
    return Timeout(text) if isinstance(error, Timeout) else Error(text)
