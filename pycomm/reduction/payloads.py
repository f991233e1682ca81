"""Exchange of payloads by hooks: all-to-all and all-gather of bytes.

Both work on any process group whose backend moves bytes, on any device. They wait for payloads of a
device by its stream alone: what a failed operation leaves there is NaN for all codecs but those of
variable size, to which any bytes are values. These payloads are waited for on the host, which has
waited for their sizes already.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count

import torch
import torch.distributed as dist

from pycomm.errors import WireMismatch
from pycomm.policy.exchange import answer

Payloads = tuple[torch.Tensor, list[tuple[int, int]]]
"""Payloads received from the ranks: uint8 [bytes of all payloads + room behind them]; by rank, the
offset and the bytes of its payloads."""


def parts(payloads: Payloads) -> list[torch.Tensor]:
    """Return the payloads of each rank."""
    memory, places = payloads
    return [memory[begin : begin + size] for begin, size in places]


def all_to_all(
    payloads: torch.Tensor,
    sizes: Sequence[int],
    most: int,
    group: dist.ProcessGroup,
    *,
    variable: bool,
    room: int = 0,
) -> Payloads:
    """Send each rank its payloads; return the payloads that each rank sends us.

    Args:
        payloads: uint8, the payloads for rank 0, then those for rank 1, ...
        sizes: bytes for each rank.
        most: bytes that each rank sends us; with `variable` the largest number.
        group: any process group whose backend has all_to_all_single.
        variable: sizes vary, so ranks exchange them first.
        room: spare bytes behind the received payloads.

    Raises:
        WireMismatch: a rank announces impossible sizes.
    """
    incoming = [most] * group.size()
    if variable:
        ours = torch.tensor(sizes, device=payloads.device, dtype=torch.int64)
        theirs = torch.empty_like(ours)
        sent = dist.all_to_all_single(theirs, ours, group=group, async_op=True)
        incoming = _checked(answer(sent, theirs), incoming)
    total = sum(incoming)
    memory = payloads.new_empty(total + room)
    # The group's own method: the function of torch.distributed has checks that cost six calls.
    work = group.alltoall_base(memory[:total], payloads, incoming, list(sizes))
    if variable:
        answer(work, memory[:1])
    else:
        work.wait()
    return memory, list(zip(accumulate(incoming, initial=0), incoming, strict=False))


def all_gather(
    payload: torch.Tensor,
    size: int,
    most: Sequence[int],
    group: dist.ProcessGroup,
    *,
    variable: bool,
    room: int = 0,
) -> Payloads:
    """Return every rank's payloads.

    Args:
        payload: uint8; our payloads are its first `size` bytes.
        size: bytes of our payloads.
        most: bytes of each rank's payloads; with `variable` the largest number.
        group: any process group whose backend has all_gather.
        variable: sizes vary, so ranks exchange them first.
        room: spare bytes behind the received payloads.

    Raises:
        WireMismatch: a rank announces impossible sizes.
    """
    sizes = list(most)
    if variable:
        ours = torch.tensor([size], device=payload.device, dtype=torch.int64)
        theirs = ours.new_empty(group.size())
        sizes = _checked(answer(group._allgather_base(theirs, ours), theirs), sizes)
    largest = max(sizes)
    padded = payload[:largest]
    if padded.numel() < largest:
        padded = payload.new_empty(largest)
        padded[:size] = payload[:size]
    memory = payload.new_empty(len(sizes) * largest + room)
    work = group._allgather_base(memory[: len(sizes) * largest], padded)
    if variable:
        answer(work, memory[:1])
    else:
        work.wait()
    return memory, list(zip(count(0, largest), sizes, strict=False))


def _checked(said: torch.Tensor, most: Sequence[int]) -> list[int]:
    """Return the sizes that ranks announce, checked before any memory is allocated for them."""
    sizes = [int(size) for size in said.view(-1).tolist()]
    for r, (size, bound) in enumerate(zip(sizes, most, strict=True)):
        if not 0 <= size <= bound or size % 4:
            raise WireMismatch(
                f"rank {r} is to send {size} bytes of payloads, where at most {bound} can be, "
                "a multiple of 4: run the same pycomm with the same codecs on all ranks"
            )
    return sizes
