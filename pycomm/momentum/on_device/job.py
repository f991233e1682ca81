"""The passes over a bucket in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm.momentum.moment import BOUND
from pycomm.momentum.on_device.moment import DeviceMoment
from pycomm.momentum.on_device.passes import DTYPES, DevicePasses
from pycomm.momentum.on_device.table import Table


class Job:
    """The passes over a bucket in one step: `encode`, `sent` if something is kept, `land`.

    Args:
        passes: the kernels.
        table: the matrices; what was sent is kept if it says where.
        values: the bucket, contiguous.
        unit: the loss scale.
        ranks: number of ranks that average their momenta.
        looks: this step's second moments travel.
        divides: what is coded is divided by the roots of the second moments.
        copies: keep a copy of what is coded for `sent`, since the exchange overwrites the values.
    """

    def __init__(
        self,
        passes: DevicePasses,
        table: Table,
        values: torch.Tensor,
        *,
        unit: float,
        ranks: int,
        looks: bool,
        divides: bool,
        copies: bool,
    ) -> None:
        self._passes, self._table, self._values = passes, table, values
        self._dtype = DTYPES[values.dtype]
        self._unit, self._ranks = unit, ranks
        self._looks, self._divides, self._copies = looks, divides, copies
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
        scale: Callable[[Sequence[DeviceMoment]], None] | None = None,
    ) -> None:
        """Replace gradients by what is coded.

        Args:
            swapped: see `SideStream`; None: residuals are where the host believes them to be.
            scale: function that gives moments without second moments the scale of their first
                coding; None: all have them.
        """
        self.encoded = True
        values, native, parts = self._values, self._table.native, self._table.parts
        own = self._table.own
        turns: list[tuple[Any, ...]] = []
        new = []
        for i, (moment, piece) in enumerate(parts):
            if not moment.knows:
                new.append(moment)
            moment.entered = True
            signs, first, stride = moment.turn
            side = piece.residual.side if piece and piece.residual else 0
            read = own[i].side if own is not None and own[i].last_step else -1
            beta = float(moment.settings["betas"][0])
            turn = (signs if self._looks else 0, first, stride, beta, read, side)
            turns.append(turn)
            self._sides.append(side)
        at = values.data_ptr()
        scratch = values.new_empty(native.scratch_floats, dtype=torch.float32)
        self._swapped = 0 if swapped is None else swapped.data_ptr()
        self._passes.call(
            native.squares,
            *(at, self._dtype, turns, scratch.data_ptr()),
            *(1 / self._unit, BOUND, self._ranks),
        )
        if new and scale is not None:
            scale(new)
        if self._copies:
            self.coded = torch.empty_like(values)
        self._passes.call(
            native.encode,
            *(at, self._dtype, turns, self.coded.data_ptr() if self._copies else 0),
            *(scratch.data_ptr(), self._divides, self._swapped),
        )

    def sent(self) -> None:
        """Store what this rank has sent, of values that are coded and not yet averaged."""
        own = self._table.own
        assert own is not None
        befores = self.befores or [None] * len(own)
        sendings = []
        for before, side, one in zip(befores, self._sides, own, strict=True):
            at = 0 if before is None else before.data_ptr()
            sendings.append((at, side, 1 - one.side))
        at = self.coded.data_ptr()
        self._passes.call(self._table.native.sent, at, self._dtype, sendings, self._swapped)

    def land(self) -> None:
        """Make the ranks' mean a momentum."""
        at = self._values.data_ptr()
        self._passes.call(self._table.native.land, at, self._dtype, self._unit, self._divides)
        for moment, _ in self._table.parts:
            moment.landed = True
