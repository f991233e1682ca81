"""The passes over a bucket in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm.momentum.moment import CodedMoment
from pycomm.momentum.passes import DTYPES, Passes
from pycomm.momentum.table import Table


class Job:
    """The passes over a bucket in one step: `encode`, `sent` if something is kept, `land`.

    Args:
        passes: the passes.
        table: the matrices; what was sent is kept if it says where.
        values: the bucket, contiguous.
        unit: the loss scale.
        ranks: number of ranks that average their momenta.
        looks: this step's second moments travel.
        divides: what is coded is divided by the roots of the second moments.
        room: function that returns memory for a copy of what is coded, for `sent`, where the
            exchange overwrites the values; None: it does not.
    """

    def __init__(
        self,
        passes: Passes,
        table: Table,
        values: torch.Tensor,
        *,
        unit: float,
        ranks: int,
        looks: bool,
        divides: bool,
        room: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._passes, self._table, self._values = passes, table, values
        self._dtype = DTYPES[values.dtype]
        self._unit, self._ranks = unit, ranks
        self._looks, self._divides, self._room = looks, divides, room
        self.encoded = False
        """`encode` was called."""
        self.befores: Sequence[torch.Tensor | None] = ()
        """Copies of residuals that the coding overwrites; see `BucketReducer.residuals_before`."""
        self.coded = values
        """What was coded. It lives as long as this: another stream may be yet to read it."""
        self.keeps = table.own is not None
        """What this rank has sent is kept."""
        self._swapped = 0
        self._sides: list[int] = []

    def encode(
        self,
        swapped: torch.Tensor | None = None,
        scale: Callable[[Sequence[CodedMoment]], None] | None = None,
    ) -> None:
        """Replace gradients by what is coded.

        Args:
            swapped: see `SideStream`; None: residuals are where the host believes them to be.
            scale: function that gives moments without second moments the scale of their first
                coding; None: all have them.
        """
        self.encoded = True
        values, native, parts = self._values, self._table.native, self._table.parts
        own, shards = self._table.own, self._table.shards
        turns: list[tuple[Any, ...]] = []
        new = []
        for i, (moment, piece) in enumerate(parts):
            if self._ranks > 1 and piece and moment.codec is not piece.codec:
                moment.use(piece.codec)
            if not moment.knows:
                new.append(moment)
            moment.entered = True
            signs, first, stride = moment.turn
            side = piece.residual.side if piece and piece.residual else 0
            # Of shards of other ranks the momentum is unknown.
            goes_on = own is not None and (own[i].last_step or shards > 1)
            read = own[i].side if own is not None and goes_on else -1
            turn = (
                *(signs if self._looks else 0, first, stride),
                *(*moment.by, read, side, not moment.knows),
            )
            turns += [turn] * shards
            self._sides += [side] * shards
        if self._room is not None:
            self.coded = self._room(values)
        scratch = 0
        if not self._passes.kernels.on_host:
            floats = values.new_empty(native.scratch_floats, dtype=torch.float32)
            scratch = floats.data_ptr()
        self._swapped = 0 if swapped is None else swapped.data_ptr()
        bound = parts[0][0].bound(self._ranks)
        job = (
            *(values.data_ptr(), self._dtype, 1 / self._unit, bound, self._ranks),
            *(0 if self.coded is values else self.coded.data_ptr(), self._divides),
            *(scratch, self._swapped),
        )
        if new and scale is not None:
            self._passes.call(native.squares, job, turns)
            scale(new)
        self._passes.call(native.encode, job, turns)

    def sent(self) -> None:
        """Store what this rank has sent, of values that are coded and not yet averaged."""
        own, shards = self._table.own, self._table.shards
        assert own is not None
        befores = self.befores or [None] * len(self._sides)
        sendings = []
        for i, (before, side) in enumerate(zip(befores, self._sides, strict=True)):
            at = 0 if before is None else before.data_ptr()
            _, kept = self._table.parts[i // shards][0].by
            sendings.append((at, side, 1 - own[i // shards].side, kept))
        at = self.coded.data_ptr()
        self._passes.call(
            *(self._table.native.sent, at, self._dtype, sendings, self._divides, self._swapped)
        )

    def land(self, result: torch.Tensor | None = None) -> None:
        """Make the ranks' mean a momentum.

        Args:
            result: of a reduce-scatter, this rank's own shards; None: it is in the bucket.
        """
        mean = self._values if result is None else result
        self._passes.call(
            *(self._table.landed.land, mean.data_ptr(), DTYPES[mean.dtype]),
            *(self._unit, self._divides),
        )
        for moment, _ in self._table.parts:
            moment.landed = True
