"""Hand-over: what a new member needs, from a member that has it."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from pycomm.arguments import typed
from pycomm.elastic.contents import Contents, filled_up, rows_of
from pycomm.errors import Error, PeerLost, Timeout, WireMismatch
from pycomm.policy.exchange import answer, device_of, gather, gather_json

_CHUNK = 4 << 20  # bytes of a message
_AHEAD = 2  # chunks on their way


def hand_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    has: bool,
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """Give the members that are new the model and the optimizer of one that has them; collective.

    All ranks of the group call it, with models that have the same names, shapes and dtypes. The
    first rank that has the state broadcasts it, in chunks; the other ranks that have it take part
    and keep theirs.

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

    Returns:
        The rank that has sent its state; None if no member was new.

    Raises:
        TypeError: an argument has another type.
        WireMismatch: models, optimizers or arguments differ; on all ranks, before a tensor is sent.
        Error: no rank has the state; a rank's model cannot be handed over, or a rank has failed (on
            all ranks); or the transfer has failed with another backend.
        PeerLost: a rank is gone. With backends other than "pycomm" it may be an `Error`.
        Timeout: a rank did not come, or the next chunk did not, within the group's timeout.

    Example:
        >>> pycomm.elastic.reconfigure(3, handles)  # doctest: +SKIP
        >>> pycomm.elastic.hand_over(net, optimizer, has=step > 0)  # doctest: +SKIP
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
    """
    typed("model", model, nn.Module)
    typed("optimizer", optimizer, torch.optim.Optimizer, None)
    typed("has", has, bool)
    contents = Contents(model, optimizer)
    text, rest = contents.pack() if has and not contents.problem else (b"", [])

    group = group or c10d._get_default_group()
    members = _meet(contents, has, len(text), rest, group)
    having = [rank for rank, member in enumerate(members) if member["has"]]
    if len(having) == len(members):
        return None
    root = having[0]
    sent = None
    if group.rank() == root:
        sent = [torch.frombuffer(bytearray(text), dtype=torch.uint8), *contents.tensors, *rest]
    try:
        content = _broadcast(sent, root, members[root]["total"], has, group)
    except RuntimeError as error:
        raise _told(error, group.rank(), root) from error
    if not has:
        contents.take(content, members[root]["written"])
    return root


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the rows of tensors in chunks of one size, but for the last one."""
    parts: list[torch.Tensor] = []
    held = 0
    for row in itertools.chain.from_iterable(map(rows_of, tensors)):
        while row.numel():
            parts.append(row[: _CHUNK - held])
            held += parts[-1].numel()
            row = row[parts[-1].numel() :]
            if held == _CHUNK:
                yield torch.cat(parts)
                parts, held = [], 0
    if parts:
        yield torch.cat(parts)


def _room(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _broadcast(
    sent: Sequence[torch.Tensor] | None,
    root: int,
    total: int,
    has: bool,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the bytes that a rank sends to all (uint8, on the CPU); collective.

    A rank that fails by itself takes part to the end, so that it holds nobody up.

    Args:
        sent: the tensors of the rank that sends; None: this rank is another one.
        root: the rank that sends.
        total: bytes of their rows.
        has: this rank does not need what is sent.
        group: the ranks.

    Raises:
        Error: another rank has failed.
    """
    device = device_of(group)
    failure: Exception | None = None
    content = _room(0)
    if not has:
        try:
            content = _room(total)
        except (MemoryError, RuntimeError) as error:
            failure = error
    chunks = _chunks(sent or ())
    under_way: deque[tuple[dist.Work, torch.Tensor, int]] = deque()

    def land() -> None:
        work, chunk, begin = under_way.popleft()
        arrived = answer(work, chunk)
        if content.numel():
            content[begin : begin + chunk.numel()] = arrived

    for begin in range(0, total, _CHUNK):
        chunk = _room(min(_CHUNK, total - begin))
        if sent is not None and failure is None:
            try:
                chunk = next(chunks)
            except Exception as error:
                failure = error
        chunk = chunk.to(device)
        under_way.append((group.broadcast(chunk, root), chunk, begin))
        if len(under_way) == _AHEAD:
            land()
    while under_way:
        land()
    rows = gather([failure is not None], group, device)
    if failure is not None:
        raise failure
    if failed := [rank for rank, (has_failed,) in enumerate(rows) if has_failed]:
        raise Error(f"rank {failed[0]} has failed")
    return content


def _meet(
    contents: Contents,
    has: bool,
    written: int,
    rest: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> list[dict[str, Any]]:
    """Return what all members have, in rank order, after they have been compared; collective."""
    rank = group.rank()
    sizes = [written, *(t.numel() * t.element_size() for t in (*contents.tensors, *rest))]
    mine = {
        "has": has,
        "problem": contents.problem,
        "digest": hashlib.sha256("\n".join(contents.lines).encode()).hexdigest(),
        "written": written,  # bytes of what `Contents.pack` has written
        "total": sum(map(filled_up, sizes)) if has else 0,  # bytes that it would send
    }
    members = gather_json(mine, group)
    for refusing, member in enumerate(members):
        if member["problem"]:
            raise Error(
                f"rank {rank}: rank {refusing} cannot take part in the hand-over: "
                f"{member['problem']}"
            )
    if any(member["digest"] != members[0]["digest"] for member in members):
        texts = gather_json(contents.lines, group)
        other = next(r for r, text in enumerate(texts) if text != texts[0])
        pairs = itertools.zip_longest(texts[0], texts[other], fillvalue="nothing more")
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise WireMismatch(
            f"rank {rank}: the members cannot hand over their state: rank 0 has {first!r}, rank "
            f"{other} has {second!r}. Nothing was sent. Make the same model and optimizer on all "
            "ranks, and pass the same arguments"
        )
    if not any(member["has"] for member in members):
        raise Error(
            f"rank {rank}: no rank has the state (has=False on all {len(members)}): load a "
            "checkpoint on one, and pass has=True there"
        )
    return members


def _told(error: RuntimeError, rank: int, root: int) -> Error:
    """Return the error of a transfer that failed, with what to do."""
    text = (
        f"rank {rank}: the hand-over of rank {root}'s state has failed here: {error}. Its model "
        "and optimizer are unchanged. Form the group without the ranks that are gone, and call "
        "hand_over again on all"
    )
    if isinstance(error, PeerLost):
        return PeerLost(text, error.rank, error.ranks)
    return Timeout(text) if isinstance(error, Timeout) else Error(text)
