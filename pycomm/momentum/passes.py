"""The passes of csrc/optim over the moments of a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.call = kernels, kernels.call
        self._all: Table | None = None

    def scale(self, moments: Sequence[CodedMoment], sum_up: Callable[[torch.Tensor], int]) -> None:
        """Make the ranks' sums of this step the scale of the first coding of these moments.

        Args:
            moments: those without second moments.
            sum_up: function that adds a tensor up over the ranks, and returns the number of those
                that have a gradient of the same rows.
        """
        table = Table(self.kernels, [(moment, None) for moment in moments])
        sums = self._sums_of(table)
        self.call(table.native.collect, sums.data_ptr())
        ranks = sum_up(sums)
        how = [(_C.MomentUse.scale, 0.0, 0.0)] * len(moments)
        self.call(table.native.commit, sums.data_ptr(), how, ranks)
        for moment in moments:
            moment.knows = True

    def _sums_of(self, table: Table) -> torch.Tensor:
        return torch.empty(table.sums_numel, dtype=torch.float32, device=self.kernels.device)

    def sums_of(self, moments: Sequence[CodedMoment]) -> torch.Tensor:
        """Return memory for the sums of all moments."""
        return self._sums_of(self._table(moments))

    def collect(self, moments: Sequence[CodedMoment], sums: torch.Tensor) -> None:
        """Write this rank's mean sums of the steps since the last exchange, of all moments."""
        for moment in moments:
            moment.complete()
        self.call(self._table(moments).native.collect, sums.data_ptr())

    def commit(
        self,
        moments: Sequence[CodedMoment],
        sums: torch.Tensor | None,
        ranks: int,
        used: Callable[[CodedMoment], bool],
    ) -> None:
        """Fold the ranks' sums into the second moments, and compute the factors.

        All ranks count the step, also a rank whose squares overflow and are left out: the ranks'
        number of steps decides how far second moments decay and values move.

        Args:
            moments: all moments.
            sums: the total of what `collect` wrote, over the ranks; None: it did not travel.
            ranks: the number of those that have a gradient of the same rows.
            used: function that tells whether a moment's parameter takes part in the step.
        """
        how = []
        for moment in moments:
            if used(moment):
                moment.start()
                moment.complete()
            use = _C.MomentUse.step if used(moment) else _C.MomentUse.nothing
            how.append((use, moment.decay, moment.eps))
        at = 0 if sums is None else sums.data_ptr()
        self.call(self._table(moments).native.commit, at, how, ranks)

    def refresh(self, moments: Sequence[CodedMoment]) -> None:
        """Compute the factors of second moments that were loaded, after `begin`."""
        if not any(moment.is_stale for moment in moments):
            return
        how = [(_C.MomentUse.nothing, 0.0, moment.eps) for moment in moments]
        self.call(self._table(moments).native.commit, 0, how, 1)
        for moment in moments:
            moment.is_stale = False

    def move(
        self,
        moments: Sequence[CodedMoment],
        chosen: Sequence[CodedMoment],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Move parameters by their momenta, which are their gradients, and keep the momenta.

        Args:
            moments: all moments.
            chosen: those of the parameters.
            lr, weight_decay: of their group.
        """
        table = self._table(moments)
        steps: dict[torch.dtype, list[tuple[Any, ...]]] = {}
        alive = []  # until the kernels are queued
        strided = []
        for moment in chosen:
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
        written([moment.parameter for moment in chosen])

    def _table(self, moments: Sequence[CodedMoment]) -> Table:
        """Return the table of all moments of the state."""
        known = self._all is not None and len(self._all.parts) == len(moments)
        if self._all is None or not known or not self._all.is_current:
            self._all = Table(self.kernels, [(moment, None) for moment in moments])
        return self._all
