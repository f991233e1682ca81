"""The passes of csrc/optim over the moments of a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.momentum.kernels import Kernels, written
from pycomm.momentum.moment import CodedMoment, local
from pycomm.momentum.table import Table
from pycomm.policy.rules import CODED

DTYPES = {dtype: core_dtype(dtype) for dtype in CODED}


class Passes:
    """The passes over all moments of a state, which wait for nothing on a device.

    Args:
        kernels: what runs them.
        moments: the moments, by name; there may be more later.
    """

    def __init__(self, kernels: Kernels, moments: Mapping[str, CodedMoment]) -> None:
        self.kernels, self.call, self._moments = kernels, kernels.call, moments
        self._all: Table | None = None

    def scale(self, moments: Sequence[CodedMoment], sum_up: Callable[[torch.Tensor], int]) -> None:
        """Make the ranks' sums of this step the scale of the first coding of these moments.

        Args:
            moments: those without second moments.
            sum_up: function that adds a tensor up over the ranks, and returns the number of those
                that have a gradient of the same rows.
        """
        table = Table(self.kernels, [(moment, None) for moment in moments])
        sums = self.room_for_sums(table)
        self.call(table.native.collect, sums.data_ptr())
        ranks = sum_up(sums)
        how = [(_C.MomentUse.scale, 0.0, 0.0)] * len(moments)
        self.call(table.native.commit, sums.data_ptr(), how, ranks)
        for moment in moments:
            moment.knows = True

    def room_for_sums(self, table: Table | None = None) -> torch.Tensor:
        """Return memory for the sums of a table's moments; None: of all."""
        numel = (table or self._table()).sums_numel
        return torch.empty(numel, dtype=torch.float32, device=self.kernels.device)

    def collect(self, sums: torch.Tensor) -> None:
        """Write this rank's mean sums of the steps since the last exchange, of all moments."""
        for moment in self._moments.values():
            moment.complete()
        self.call(self._table().native.collect, sums.data_ptr())

    def commit(self, sums: torch.Tensor | None, ranks: int) -> None:
        """Fold the ranks' sums into the second moments, and compute the factors.

        All ranks count the step, also a rank whose squares overflow and are left out: the ranks'
        number of steps decides how far second moments decay and values move.

        Args:
            sums: the total of what `collect` wrote, over the ranks; None: it did not travel.
            ranks: the number of those that have a gradient of the same rows.
        """
        how = []
        for moment in self._moments.values():
            use = _C.MomentUse.nothing
            if moment.parameter.grad is not None:  # it takes part in the step
                moment.start()
                moment.complete()
                use = _C.MomentUse.step
            how.append((use, moment.decay, moment.eps))
        at = 0 if sums is None else sums.data_ptr()
        self.call(self._table().native.commit, at, how, ranks)

    def refresh(self) -> None:
        """Compute the factors of second moments that were loaded, after `begin`."""
        moments = self._moments.values()
        if not any(moment.is_stale for moment in moments):
            return
        how = [(_C.MomentUse.nothing, 0.0, moment.eps) for moment in moments]
        self.call(self._table().native.commit, 0, how, 1)
        for moment in moments:
            moment.is_stale = False

    def move(self, moments: Sequence[CodedMoment], lr: float, weight_decay: float) -> None:
        """Move parameters of a group by their momenta, which are their gradients."""
        table = self._table()
        steps: dict[torch.dtype, list[tuple[Any, ...]]] = {}
        alive = []  # until the kernels are queued
        strided = []
        for moment in moments:
            state, parameter = moment.state, local(moment.parameter.detach())
            assert moment.parameter.grad is not None
            state["step"].add_(1)
            gradient, values = local(moment.parameter.grad).contiguous(), parameter.contiguous()
            alive += [gradient, values]
            if values is not parameter:  # in another memory format
                strided.append((parameter, values))
            steps.setdefault(parameter.dtype, []).append(
                (
                    *(table.numbers[id(moment)], values.data_ptr(), gradient.data_ptr()),
                    *(*moment.advance(lr, weight_decay), moment.kept),
                    *(moment.divides, moment.landed),
                )
            )
        for dtype, each in steps.items():
            self.call(table.native.move, each, DTYPES[dtype])
        for parameter, values in strided:
            parameter.copy_(values)
        written([moment.parameter for moment in moments])

    def _table(self) -> Table:
        """Return the table of all moments of the state."""
        table = self._all
        if table is None or len(table.parts) != len(self._moments) or not table.is_current:
            parts = [(moment, None) for moment in self._moments.values()]
            table = self._all = Table(self.kernels, parts)
        return table
