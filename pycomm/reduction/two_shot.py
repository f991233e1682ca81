"""Compressed collectives on any process group: payloads go by all-to-all and all-gather.

The algorithm, cuts and numbers are those of csrc/collectives/coded/coded.h, on top of
torch.distributed; results are equal bit for bit. It works with any backend that moves bytes, on any
device. Values are encoded and decoded in C++, a bucket in one call, on the CPU or by kernels
(`pycomm.reduction.batched`); codecs of other implementations go through their tensor interface.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pycomm.reduction.batched import Batched
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import (
    Coder,
    Packed,
    Run,
    chunks,
    finish,
    float32_view,
    is_variable,
    total_bytes,
    whole,
    widened,
)
from pycomm.reduction.payloads import all_gather as gather_payloads
from pycomm.reduction.payloads import all_to_all, parts


class Dealt:
    """The runs of an all-reduce: those that owners sum, and those that all ranks get.

    Args:
        runs: runs of pieces in a bucket.
        ranks: number of owners.
    """

    def __init__(self, runs: Sequence[Run], ranks: int) -> None:
        dense = [run for run in runs if run.piece.codec.combine != "gather"]
        self.shown = [run for run in runs if run.piece.codec.combine == "gather"]
        """The runs that all ranks get."""
        self.owned = [Packed(own) for own in chunks(dense, ranks)] if dense else []
        """The other runs, by owner; empty if there are none."""

    def order(self) -> list[list[Run]]:
        """Return the runs of each owner and those that all ranks get, to code one by one."""
        return [*(part.order for part in self.owned), self.shown]


def all_reduce(
    values: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    seed: int,
    step: int,
    senders: Sequence[float] | None = None,
    part: tuple[Sequence[Run], int] | None = None,
    found_inf: torch.Tensor | None = None,
    swapped: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Average `values` over all ranks of a group, encoded on the way.

    Decoded values are summed in float32 in rank order and divided once: by their owner, which
    encodes the average; or by every rank, if there is no owner (``combine`` "gather").

    Args:
        values: floats of 16 or 32 bits [bucket.numel], contiguous; holds the result afterwards.
        bucket: layout and residuals of the values.
        group: any process group whose backend has all_to_all_single and all_gather.
        seed: equal on all ranks.
        step: number of the step, below 2^32.
        senders: what each rank counts where only the ranks that have sent a value are averaged: in
            sparse payloads, which the others then do not pull towards zero. None: all ranks count.
        part: the runs of a part of the bucket, the same in every call for it, whose values alone
            are read and written, and the divisor of their sums, which are sums already; None: all
            values, and the number of ranks.
        found_inf: float32 [1] on the device of the values, which becomes 1 if the result is not
            finite; None: that is returned.
        swapped: on the path "kernels", see `Batched.begin`.

    Returns:
        A bool tensor without dimensions: whether the result is finite everywhere; None: `found_inf`
        tells.

    Raises:
        WireMismatch: a rank sends payloads of impossible sizes.
    """
    rank, ranks = group.rank(), group.size()
    dealt: Dealt | None = bucket.dealt.get(ranks)
    if dealt is None:
        runs = whole(bucket.pieces) if part is None else part[0]
        dealt = bucket.dealt[ranks] = Dealt(runs, ranks)
    owned, shown = dealt.owned, dealt.shown
    divisor = ranks if part is None else part[1]
    batched: Batched | None = None
    if senders is None or not shown:
        if values.is_contiguous():
            batched = bucket.batched.get(("all_reduce", rank, ranks))
        batched = batched or Batched.find("all_reduce", bucket, group, dealt.order, values)
    if batched is not None:
        batched.begin(
            bucket.sides,
            values.dtype,
            group,
            seed=seed,
            step=step,
            divisor=divisor,
            found_inf=found_inf,
            swapped=swapped,
        )
        finite = True
        if owned:
            finite = batched.land(values, batched.own(values, batched.scatter(values)))
        if shown:
            finite &= batched.add_up(values, len(owned), batched.show(values, len(owned)))
        if found_inf is None:
            return batched.verdict(finite)
        batched.scratch = None
        if not finite:  # which is known of host tensors alone
            found_inf.fill_(1)
        return None
    flag = _flag(values) if found_inf is None else found_inf
    coder = Coder(rank, seed=seed, step=step)
    if owned:
        _reduce_dense(values, owned, coder, group, divisor, flag)
    if shown:
        ours = coder.encode(shown, widened(shown, values), values.device, worker=True)
        most, sums = [total_bytes(shown)] * ranks, float32_view(shown, values)
        came = gather_payloads(ours, ours.numel(), most, group, variable=is_variable(shown))
        if senders is None:
            for r, payload in enumerate(parts(came)):
                coder.decode(shown, payload, sums, add=r > 0)
            finish(shown, sums, values, divisor, flag)
        else:
            _average_senders(shown, parts(came), coder, senders, sums)
            finish(shown, sums, values, 1, flag)
    return flag[0] == 0 if found_inf is None else None


def _average_senders(
    runs: Sequence[Run],
    payloads: Sequence[torch.Tensor],
    coder: Coder,
    counts: Sequence[float],
    means: Sequence[torch.Tensor],
) -> None:
    """Average each value over the ranks that have sent it, in rank order; 0 if none has."""
    totals = [torch.zeros_like(mean) for mean in means]
    theirs = [torch.empty_like(mean) for mean in means]
    for mean in means:
        mean.zero_()
    for payload, count in zip(payloads, counts, strict=True):
        coder.decode(runs, payload, theirs, add=False)
        for mean, part, total in zip(means, theirs, totals, strict=True):
            mean.add_(part)
            total.add_(part != 0, alpha=count)
    for mean, total in zip(means, totals, strict=True):
        mean.div_(total.masked_fill_(total == 0, 1))


def _flag(like: torch.Tensor) -> torch.Tensor:
    """Return the overflow flag for `convert`."""
    return torch.zeros(1, dtype=torch.float32, device=like.device)


def _reduce_dense(
    values: torch.Tensor,
    owned: list[Packed],
    coder: Coder,
    group: dist.ProcessGroup,
    divisor: int,
    found_inf: torch.Tensor,
) -> None:
    """Send payloads to their owners, which sum them, and the results back to all ranks."""
    rank = group.rank()
    variable = any(is_variable(part.runs) for part in owned)
    sent = [
        coder.encode(part.runs, part.widened(values), values.device, worker=True) for part in owned
    ]
    mine, sums = owned[rank].runs, owned[rank].float32_view(values)
    for r, payload in enumerate(_scatter(sent, total_bytes(mine), variable, group)):
        coder.decode(mine, payload, sums, add=r > 0)
    owned[rank].average(sums, values, divisor)
    result = coder.encode(mine, sums, values.device, worker=False)
    most = [total_bytes(part.runs) for part in owned]
    results = gather_payloads(result, result.numel(), most, group, variable=variable)
    for part, payload in zip(owned, parts(results), strict=True):
        floats = part.float32_view(values)
        coder.decode(part.runs, payload, floats, add=False)
        part.finish(floats, values, found_inf)


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
    FSDP2 lays out its input: a row has one shard of each parameter behind the other, padded
    to equal sizes (``chunk_cat`` in torch's _fsdp_collectives.py). Shard r of a parameter is
    encoded as a tensor of its own, with index 0 at its start and random numbers that depend on r.

    Args:
        output: floats of 16 or 32 bits [bucket.numel], contiguous.
        input: likewise [ranks, bucket.numel], contiguous.
        bucket: layout of a row; made with ``rows=ranks``.
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

    def deal() -> list[list[Run]]:
        return [whole(bucket.pieces)]

    batched = Batched.find("reduce_scatter", bucket, group, deal, input, output)
    if batched is not None:
        divisor = ranks if average else 1
        batched.begin(bucket.sides, output.dtype, group, seed=seed, step=step, divisor=divisor)
        finite = batched.add_up(output, 0, batched.scatter(input, ranks))
        return _all_finite(batched.verdict(finite).view(1), group)
    rows = list(input.view(ranks, -1))
    coder = Coder(rank, seed=seed, step=step)
    runs = whole(bucket.pieces)
    sent = [
        coder.encode(runs, widened(runs, values), values.device, worker=True, row=r)
        for r, values in enumerate(rows)
    ]
    sums = float32_view(runs, output)
    for r, payload in enumerate(_scatter(sent, total_bytes(runs), is_variable(runs), group)):
        coder.decode(runs, payload, sums, add=r > 0)
    found_inf = _flag(output)
    finish(runs, sums, output, ranks if average else 1, found_inf)
    return _all_finite(found_inf == 0, group)


def _all_finite(ours: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return whether all ranks' rows are finite, equal on all ranks."""
    finite = ours.to(torch.uint8)
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
    """Gather the encoded rows of all ranks and decode them to `output`, in rank order.

    Our own row goes through the codec too, so all ranks have the same bits.

    Args:
        output: floats of 16 or 32 bits [ranks, bucket.numel], contiguous.
        input: likewise [bucket.numel], contiguous; may be our row of the output.
        bucket: layout of a row.
        group: any process group whose backend has all_gather.
        seed, step: as for `all_reduce`, whose errors it raises.

    Returns:
        A bool tensor without dimensions: whether the output is finite everywhere.
    """
    rank, ranks = group.rank(), group.size()

    def deal() -> list[list[Run]]:
        return [whole(bucket.pieces)]

    batched = Batched.find("all_gather", bucket, group, deal, input, output)
    if batched is not None:
        batched.begin(bucket.sides, output.dtype, group, seed=seed, step=step, divisor=1)
        return batched.verdict(batched.land(output, batched.show(input, 0), ranks))
    coder = Coder(rank, seed=seed, step=step)
    runs = whole(bucket.pieces)
    ours = coder.encode(runs, widened(runs, input), input.device, worker=True)
    most = [total_bytes(runs)] * ranks
    came = gather_payloads(ours, ours.numel(), most, group, variable=is_variable(runs))
    found_inf = _flag(output)
    for values, payload in zip(output.view(ranks, -1), parts(came), strict=True):
        floats = float32_view(runs, values)
        coder.decode(runs, payload, floats, add=False)
        finish(runs, floats, values, 1, found_inf)
    return found_inf[0] == 0


def _scatter(
    payloads: list[torch.Tensor], most: int, variable: bool, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send payload r to rank r; return the payloads that each rank sends us."""
    sizes = [payload.numel() for payload in payloads]
    return parts(all_to_all(torch.cat(payloads), sizes, most, group, variable=variable))
