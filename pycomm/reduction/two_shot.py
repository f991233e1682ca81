"""Coded collectives on any process group: payloads go by all-to-all and all-gather.

The algorithm, cuts and numbers are those of csrc/collectives/coded/coded.h; results are equal bit
for bit. It works with any backend that moves bytes, on any device. The schedule runs in C++
(`Batched`): an operation is one call, on the CPU or on torch's current stream of a device, where
the same kernel of all parameters is one launch, and C++ calls back for each exchange of payloads.
For codecs of other implementations it runs in Python (`pycomm.reduction.coding`), one run at a
time: payloads, their order and all results are the same, so ranks may use either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.codecs.implementations import Launcher, current_stream, launcher
from pycomm.policy.rules import CODED
from pycomm.reduction import paths, payloads
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import (
    ExchangePlan,
    Run,
    Runs,
    all_reduce_plan,
    is_variable,
    rows_plan,
    total_bytes,
    whole,
)

_DTYPES = {dtype: core_dtype(dtype) for dtype in CODED}


class Batched:
    """One rank's operation on a bucket.

    It runs for every bucket, so it is written with few calls of Python: what depends on the layout
    alone is made here, and a step calls C++ and the group's own methods.

    Args:
        bucket: a bucket whose codecs run in C++; see `find`.
        plan: what is exchanged.
        group: the ranks.
        device: the device of the values.
    """

    def __init__(
        self, bucket: Bucket, plan: ExchangePlan, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        # The bucket is not stored here, since it holds this object: its memory would stay until the
        # cycle is collected.
        self._rank, self._ranks = group.rank(), group.size()
        native = self._native = _C.CodedBucket(self._rank, self._ranks, bucket.rows)
        for piece in bucket.pieces:
            options: dict[str, Any] = {}
            if piece.residual is not None:
                options = piece.residual.options()
                options["kind"] = getattr(_C.FeedbackKind, options["kind"])
                options["storage"] = getattr(_C.FeedbackStorage, options["storage"])
                for role, pair in piece.residual.pairs():
                    options[role] = [side.data_ptr() for side in pair]
            native.add(piece.numel, piece.codec.native, tensor=piece.tensor, **options)
        numbers = {id(piece): i for i, piece in enumerate(bucket.pieces)}

        def placed(runs: Runs) -> list[tuple[int, int, int]]:
            return [(numbers[id(run.piece)], run.begin, run.end - run.begin) for run in runs]

        owned = [] if plan.rows else [placed(runs) for runs in plan.owned]
        native.plan(
            owned,
            placed(plan.shown),
            rows=plan.rows,
            scatters=plan.scatters,
            gathers=plan.gathers,
        )
        self._most = [total_bytes(runs) for runs in plan.owned]
        self._most_shown = [total_bytes(plan.shown)] * self._ranks
        self._variable = any(map(is_variable, plan.owned)), is_variable(plan.shown)
        self._room, self._memory_bytes = native.room_behind, native.memory_bytes
        self._device, self._on_device = device, device.type != "cpu"
        codecs = [piece.codec for piece in bucket.pieces] if self._on_device else []
        # Where the core does not start the kernels itself: the function that does.
        self._launch: Launcher | None = launcher(codecs[0], device.type) if codecs else None

    def run(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        *,
        found_inf: torch.Tensor,
        swapped: torch.Tensor | None = None,
        encoded: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        """Run the operation, on a device on torch's current stream.

        The arguments are those of `exchange`; the bucket and the group are those for which
        this was made.
        """
        dtype, empty = _DTYPES[output.dtype], partial(torch.empty, dtype=torch.uint8)
        kept = [empty(self._memory_bytes, device=self._device)]
        options["found_inf"] = found_inf.data_ptr()
        launch: Any = self._launch
        elsewhere = False  # torch's current device is another one
        if self._on_device:
            room = self._native.scratch_bytes(dtype)
            kept.append(empty(room, device=self._device))
            options["scratch"] = kept[1].data_ptr(), room
            options["stream"] = 0 if launch else current_stream(self._device)
            options["swapped"] = 0 if swapped is None else swapped.data_ptr()
            if launch is not None:
                launch = partial(launch, device=self._device)
            else:
                elsewhere = torch._C._cuda_getDevice() != self._device.index
        call = partial(
            self._native.run,
            (input.data_ptr(), input.numel()),
            (output.data_ptr(), output.numel()),
            *(dtype, bucket.sides, (kept[0].data_ptr(), self._memory_bytes)),
            *(partial(self._move, group, kept, encoded), launch),
            **options,
        )
        if elsewhere:
            with torch.cuda.device(self._device):
                call()
        else:
            call()

    def _move(
        self,
        group: dist.ProcessGroup,
        kept: list[torch.Tensor],
        encoded: Callable[[], None] | None,
        shot: _C.Shot,
        begin: int,
        sizes: list[int],
    ) -> tuple[int, int, list[tuple[int, int]]]:
        """Move the payloads of a shot for C++."""
        if encoded is not None and len(kept) == 1 + self._on_device:  # the first exchange
            encoded()
        shown = shot == _C.Shot.shown
        how: dict[str, Any] = {"variable": self._variable[shown], "room": self._room}
        if shot == _C.Shot.contribution:
            ours, most = kept[0][begin : begin + sum(sizes)], self._most[self._rank]
            memory, places = payloads.all_to_all(ours, sizes, most, group, **how)
        else:
            each = self._most_shown if shown else self._most
            ours = kept[0][begin : begin + max(each)]
            memory, places = payloads.all_gather(ours, sizes[0], each, group, **how)
        kept.append(memory)
        return memory.data_ptr(), memory.numel(), places


def exchange(
    op: str,
    plan: Callable[[], ExchangePlan],
    output: torch.Tensor,
    input: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    senders: Sequence[float] | None = None,
    **call: Any,
) -> None:
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
        call: of every call:

            * seed: equal on all ranks.
            * step: number of the step, below 2^32.
            * divisor: sums are divided by it.
            * found_inf: float32 [1] on the device of the values, which becomes 1 if what this rank
              has decoded is not finite.
            * swapped: of a device, on the path "kernels": float32 [1]; if it is not 0, the sides of
              all residuals are the other way round than the bucket says.
            * encoded: is called when this rank's contribution and its residuals are written, and
              the values are as they were.

    Raises:
        WireMismatch: a rank sends payloads of impossible sizes.
    """
    if senders is not None:
        call["senders"] = senders
    way = find(op, plan, bucket, group, output, input, senders=senders is not None)
    way.run(output, input, bucket, group, **call)


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
) -> None:
    """Average `values` over all ranks of a group, encoded on the way.

    Decoded values are summed in float32 in rank order and divided once: by their owner, which
    encodes the average; or by every rank, if there is no owner (``combine`` "gather").

    Args:
        values: floats of 16 or 32 bits [bucket.numel], contiguous; holds the result afterwards.
        bucket, group, senders, options: as for `exchange`, whose errors it raises.
        part: the runs of a part of the bucket, the same in every call for it, whose values alone
            are read and written, and the divisor of their sums, which are sums already; None: all
            values, and the number of ranks.
    """
    ranks = group.size()
    runs, options["divisor"] = part or (None, ranks)

    def plan() -> ExchangePlan:
        return all_reduce_plan(whole(bucket.pieces) if runs is None else runs, ranks)

    options["senders"] = senders if bucket.gathers else None
    exchange("all_reduce", plan, values, values, bucket, group, **options)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    average: bool = True,
    **options: Any,
) -> None:
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
    """
    ranks = group.size()
    plan = partial(rows_plan, bucket.pieces, range(ranks))
    options["divisor"] = ranks if average else 1
    exchange("reduce_scatter", plan, output, input, bucket, group, **options)
