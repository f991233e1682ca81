"""Coded collectives whose schedule runs in C++, while Python moves the payloads.

An operation is one call into C++, on the CPU or on torch's current stream of a device, where the
same kernel of all parameters is one launch; C++ calls back for each exchange of payloads. In
`pycomm.reduction.coding` is the same in Python, one run at a time, with any implementation of the
codecs: payloads, their order and all results are the same, so ranks may use either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.codecs.implementations import Launcher, current_stream, launcher
from pycomm.policy.rules import CODED
from pycomm.reduction import payloads
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import ExchangePlan, Runs, is_variable, total_bytes

_DTYPES = {dtype: core_dtype(dtype) for dtype in CODED}


class Batched:
    """One rank's operation on a bucket.

    It runs for every bucket, so it is written with few calls of Python: what depends on the layout
    alone is made here, and a step calls C++ and the group's own methods.

    Args:
        bucket: a bucket whose codecs run in C++; see `two_shot.find`.
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

        The arguments are those of `two_shot.exchange`; the bucket and the group are those for which
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
