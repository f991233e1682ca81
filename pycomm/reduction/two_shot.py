"""Coded collectives on any process group: payloads go by all-to-all and all-gather.

The algorithm, cuts and numbers are those of csrc/collectives/coded/coded.h; results are equal bit
for bit. It works with any backend that moves bytes, on any device. The schedule runs in C++, on the
CPU or by kernels (`pycomm.reduction.batched`); for codecs of other implementations in Python
(`pycomm.reduction.coding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycomm.reduction import paths
from pycomm.reduction.batched import Batched
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import ExchangePlan, Run, all_reduce_plan, rows_plan, whole


def exchange(
    op: str,
    plan: Callable[[], ExchangePlan],
    output: torch.Tensor,
    input: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    senders: Sequence[float] | None = None,
    found_inf: torch.Tensor | None = None,
    **call: Any,
) -> torch.Tensor | None:
    """Run a coded operation.

    Args:
        op: name of the operation, for the bucket's caches.
        plan: function that returns what is exchanged, which is called once for each `op`.
        output: floats of 16 or 32 bits [bucket.numel], contiguous.
        input: likewise, or a row for each rank; may be the output.
        bucket: layout and residuals of the values.
        group: any process group whose backend has all_to_all_single and all_gather.
        senders: what each rank counts where only the ranks that have sent a value are averaged: in
            sparse payloads, which the others then do not pull towards zero. None: all ranks count.
        found_inf: float32 [1] on the device of the values, which becomes 1 if what this rank has
            decoded is not finite; None: that is returned.
        call: of every call:

            * seed: equal on all ranks.
            * step: number of the step, below 2^32.
            * divisor: sums are divided by it.
            * swapped: of a device, on the path "kernels": float32 [1]; if it is not 0, the sides of
              all residuals are the other way round than the bucket says.
            * encoded: is called when this rank's contribution and its residuals are written, and
              the values are as they were.

    Returns:
        A bool tensor without dimensions: whether what this rank has decoded is finite; None:
        `found_inf` tells.

    Raises:
        WireMismatch: a rank sends payloads of impossible sizes.
    """
    flag = found_inf
    if flag is None:
        flag = torch.zeros(1, dtype=torch.float32, device=output.device)
    if senders is not None:
        call["senders"] = senders
    way = find(op, plan, bucket, group, output, input, senders=senders is not None)
    way.run(output, input, bucket, group, found_inf=flag, **call)
    return flag[0] == 0 if found_inf is None else None


def find(
    op: str,
    plan: Callable[[], ExchangePlan],
    bucket: Bucket,
    group: dist.ProcessGroup,
    *tensors: torch.Tensor,
    senders: bool = False,
) -> Batched | ExchangePlan:
    """Return who codes an operation: C++ all runs of the bucket, or Python one run at a time.

    Payloads, their order and all results are the same, so that ranks may use either.

    Args:
        op, plan, bucket, group: as for `exchange`.
        tensors: what the operation reads and writes.
        senders: a value is averaged over the ranks that have sent it.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device or not tensor.is_contiguous():
            return plan()
    key = op, group.rank(), group.size(), senders
    way: Batched | ExchangePlan | None = bucket.exchanges.get(key)
    if way is None:
        path = paths.BATCHED if device.type == "cpu" else paths.KERNELS
        refusal = path.refusal(bucket, senders=senders) or path.needs(bucket, group, device)
        way = plan() if refusal else Batched(bucket, plan(), group, device)
        bucket.exchanges[key] = way
    return way


def all_reduce(
    values: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    senders: Sequence[float] | None = None,
    part: tuple[Sequence[Run], int] | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Average `values` over all ranks of a group, encoded on the way.

    Decoded values are summed in float32 in rank order and divided once: by their owner, which
    encodes the average; or by every rank, if there is no owner (``combine`` "gather").

    Args:
        values: floats of 16 or 32 bits [bucket.numel], contiguous; holds the result afterwards.
        bucket, group, senders, options: as for `exchange`, whose result and errors it has, too.
        part: the runs of a part of the bucket, the same in every call for it, whose values alone
            are read and written, and the divisor of their sums, which are sums already; None: all
            values, and the number of ranks.
    """
    ranks = group.size()
    runs, options["divisor"] = part or (None, ranks)

    def plan() -> ExchangePlan:
        return all_reduce_plan(whole(bucket.pieces) if runs is None else runs, ranks)

    options["senders"] = senders if bucket.gathers else None
    return exchange("all_reduce", plan, values, values, bucket, group, **options)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    average: bool = True,
    **options: Any,
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
        average: divide the sum by the number of ranks.
        group, options: as for `exchange`, whose errors it raises.

    Returns:
        A bool tensor without dimensions, equal on all ranks: whether all rows' results are finite.
    """
    ranks = group.size()
    plan = partial(rows_plan, bucket.pieces, range(ranks))
    divisor = ranks if average else 1
    name = "reduce_scatter"
    ours = exchange(name, plan, output, input, bucket, group, divisor=divisor, **options)
    assert ours is not None
    return all_finite(ours.view(1), group)


def all_finite(ours: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return whether the rows of all ranks are finite (a bool tensor without dimensions).

    Args:
        ours: bool [1]: whether this rank's is.
        group: the ranks.
    """
    finite = ours.to(torch.uint8)
    dist.all_reduce(finite, dist.ReduceOp.MIN, group=group)
    return finite[0] == 1
