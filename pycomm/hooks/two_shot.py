"""Compressed collectives on any process group: payloads go by all-to-all and all-gather.

The same algorithm, cuts and numbers as csrc/collectives/coded.h, on top of torch.distributed and
the codecs' tensor interface; results are equal bit for bit. It works with any backend that moves
bytes, on any device, but nothing overlaps: the "pycomm" backend does this in C++, off the caller's
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from pycomm.codecs.convert import convert
from pycomm.errors import WireMismatch
from pycomm.feedback import add_mean
from pycomm.hooks.bucket import Bucket
from pycomm.hooks.coding import (
    Coder,
    Run,
    agree,
    chunks,
    finish,
    gather_equal,
    is_variable,
    landing,
    total_bytes,
    whole,
    widened,
)


def all_reduce(
    values: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    seed: int,
    step: int,
) -> torch.Tensor:
    """Average `values` over all ranks of a group, encoded on the way.

    Decoded values are summed in float32 in rank order and divided once: by their owner, who encodes
    the average; by everybody, where the owner encodes the sum itself (``combine`` "sum") or where
    there is no owner ("gather").

    Args:
        values: floats of 16 or 32 bits [bucket.numel], contiguous; holds the result afterwards.
        bucket: what lies where, with which residual.
        group: any process group whose backend has all_to_all_single and all_gather.
        seed: equal on all ranks.
        step: number of the step, below 2^32.

    Returns:
        A bool tensor without dimensions: whether the result is finite everywhere.

    Raises:
        WireMismatch: a rank sends payloads of impossible sizes.
    """
    if values.dtype != torch.float32 and any(p.residual and p.residual.mean for p in bucket.pieces):
        # EF21 adds to all of the result before it is rounded.
        wide = convert(values, torch.float32)
        all_reduce(wide, bucket, group, seed=seed, step=step)
        found_inf = _flag(values)
        convert(wide, values, found_inf=found_inf)
        return found_inf[0] == 0
    rank, ranks = group.rank(), group.size()
    agreed = agree(bucket.pieces, [values], group)
    coder = Coder(rank, ranks, seed=seed, step=step, agreed=agreed)
    found_inf = _flag(values)

    dense = [p for p in bucket.pieces if p.codec.combine != "gather"]
    if dense:
        _reduce_dense(values, chunks(dense, ranks), coder, group, found_inf)
    shown = whole([p for p in bucket.pieces if p.codec.combine == "gather"])
    if shown:
        ours = coder.encode(shown, widened(shown, values), values.device, worker=True)
        most, sums = [total_bytes(shown)] * ranks, landing(shown, values)
        for r, payload in enumerate(_all_gather(ours, most, is_variable(shown), group)):
            coder.decode(shown, payload, sums, add=r > 0)
        finish(shown, sums, values, [ranks] * len(shown), found_inf)
    _add_means(bucket, values, found_inf)
    return found_inf[0] == 0


def _flag(like: torch.Tensor) -> torch.Tensor:
    """For `convert`: whether something has overflowed."""
    return torch.zeros(1, dtype=torch.float32, device=like.device)


def _add_means(bucket: Bucket, values: torch.Tensor, found_inf: torch.Tensor) -> None:
    for piece in bucket.pieces:
        if piece.residual is not None and piece.residual.mean is not None:
            part = values[piece.offset : piece.offset + piece.numel]
            add_mean(piece.residual, part)
            convert(part, found_inf=found_inf)


def _reduce_dense(
    values: torch.Tensor,
    owned: list[list[Run]],
    coder: Coder,
    group: dist.ProcessGroup,
    found_inf: torch.Tensor,
) -> None:
    """Two shots: to the owners, who add, and back to all."""
    rank, ranks = group.rank(), group.size()
    variable = any(is_variable(runs) for runs in owned)
    mine = owned[rank]
    sent = [coder.encode(runs, widened(runs, values), values.device, worker=True) for runs in owned]
    sums = landing(mine, values)
    for r, payload in enumerate(_all_to_all(sent, total_bytes(mine), variable, group)):
        coder.decode(mine, payload, sums, add=r > 0)
    for run, part in zip(mine, sums, strict=True):
        if run.piece.codec.combine == "recode":
            convert(part, divisor=ranks)
    result = coder.encode(mine, sums, values.device, worker=False)
    results = _all_gather(result, [total_bytes(runs) for runs in owned], variable, group)
    for runs, payload in zip(owned, results, strict=True):
        parts = landing(runs, values)
        coder.decode(runs, payload, parts, add=False)
        divisors = [ranks if run.piece.codec.combine == "sum" else 1 for run in runs]
        finish(runs, parts, values, divisors, found_inf)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    seed: int,
    step: int,
    average: bool = True,
) -> torch.Tensor:
    """Average rows over all ranks of a group, encoded on the way; `output` gets our row.

    The first shot of `all_reduce`: each value is encoded once. Row r of the input is for rank r, as
    FSDP2 lays out what it reduces: a row has one shard of each parameter behind the other, padded
    to equal sizes (``chunk_cat`` in torch's _fsdp_collectives.py). Shard r of a parameter is
    encoded as a tensor of its own, with index 0 at its start and random numbers that depend on r.

    Args:
        output: floats of 16 or 32 bits [bucket.numel], contiguous.
        input: likewise [ranks, bucket.numel], contiguous.
        bucket: what lies where in a row; made with ``rows=ranks``.
        group: any process group whose backend has all_to_all_single and all_reduce.
        seed: equal on all ranks.
        step: number of the step, below 2^32.
        average: divide the sum by the number of ranks.

    Returns:
        A bool tensor without dimensions, equal on all ranks: whether all rows' results are finite.

    Raises:
        WireMismatch: a rank sends payloads of impossible sizes.
    """
    rank, ranks = group.rank(), group.size()
    rows = list(input.view(ranks, -1))
    agreed = agree(bucket.pieces, rows, group)
    coder = Coder(rank, ranks, seed=seed, step=step, agreed=agreed)
    runs = whole(bucket.pieces)
    sent = [
        coder.encode(runs, widened(runs, values), values.device, worker=True, row=r)
        for r, values in enumerate(rows)
    ]
    means = any(piece.residual and piece.residual.mean for piece in bucket.pieces)
    result = output.float() if means else output  # EF21 adds to it before it is rounded
    sums = landing(runs, result)
    for r, payload in enumerate(_all_to_all(sent, total_bytes(runs), is_variable(runs), group)):
        coder.decode(runs, payload, sums, add=r > 0)
    found_inf = _flag(output)
    finish(runs, sums, result, [ranks if average else 1] * len(runs), found_inf)
    _add_means(bucket, result, found_inf)
    if result is not output:
        convert(result, output, found_inf=found_inf)
    finite = (found_inf == 0).to(torch.uint8)
    dist.all_reduce(finite, dist.ReduceOp.MIN, group=group)
    return finite[0] == 1


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    seed: int,
    step: int,
) -> torch.Tensor:
    """Put what every rank has encoded of its row in `output`, in rank order.

    Our own row goes through the codec too, so all ranks have the same bits.

    Args:
        output: floats of 16 or 32 bits [ranks, bucket.numel], contiguous.
        input: likewise [bucket.numel], contiguous; may be our row of the output.
        bucket: what lies where in a row.
        group: any process group whose backend has all_gather.
        seed: equal on all ranks.
        step: number of the step, below 2^32.

    Returns:
        A bool tensor without dimensions: whether the output is finite everywhere.

    Raises:
        WireMismatch: a rank sends payloads of impossible sizes.
    """
    rank, ranks = group.rank(), group.size()
    coder = Coder(rank, ranks, seed=seed, step=step)
    runs = whole(bucket.pieces)
    ours = coder.encode(runs, widened(runs, input), input.device, worker=True)
    payloads = _all_gather(ours, [total_bytes(runs)] * ranks, is_variable(runs), group)
    found_inf = _flag(output)
    for values, payload in zip(output.view(ranks, -1), payloads, strict=True):
        parts = landing(runs, values)
        coder.decode(runs, payload, parts, add=False)
        finish(runs, parts, values, [1] * len(runs), found_inf)
    return found_inf[0] == 0


def _all_to_all(
    payloads: Sequence[torch.Tensor], most: int, variable: bool, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send payload r to rank r; return what each rank sends us, `most` bytes or up to that."""
    ranks = group.size()
    sizes = [payload.numel() for payload in payloads]
    incoming = [most] * ranks
    if variable:
        ours = torch.tensor(sizes, device=payloads[0].device)
        theirs = torch.empty_like(ours)
        dist.all_to_all_single(theirs, ours, group=group)
        incoming = _checked(theirs, incoming)
    received = payloads[0].new_empty(sum(incoming))
    dist.all_to_all_single(received, torch.cat(list(payloads)), incoming, sizes, group=group)
    ends = list(accumulate(incoming))
    return [received[end - size : end] for end, size in zip(ends, incoming, strict=True)]


def _all_gather(
    payload: torch.Tensor, most: Sequence[int], variable: bool, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return every rank's payload; that of rank r has `most[r]` bytes, or up to that."""
    sizes = list(most)
    if variable:
        ours = torch.tensor([payload.numel()], device=payload.device)
        sizes = _checked(gather_equal(ours, group), sizes)
    padded = payload
    if payload.numel() < max(sizes):
        padded = payload.new_empty(max(sizes))
        padded[: payload.numel()] = payload
    gathered = gather_equal(padded, group)
    return [row[:size] for row, size in zip(gathered, sizes, strict=True)]


def _checked(said: torch.Tensor, most: Sequence[int]) -> list[int]:
    """The sizes that the ranks say they send, which none of our memory depends on before this."""
    sizes = [int(size) for size in said.view(-1).tolist()]
    for r, (size, bound) in enumerate(zip(sizes, most, strict=True)):
        if not 0 <= size <= bound or size % 4:
            raise WireMismatch(
                f"rank {r} is to send {size} bytes of payloads, where at most {bound} can be, "
                "a multiple of 4"
            )
    return sizes
