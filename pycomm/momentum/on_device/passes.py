"""The kernels of a device, for all moments of a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.momentum.moment import LIMIT
from pycomm.momentum.on_device.kernels import Kernels
from pycomm.momentum.on_device.moment import DeviceMoment
from pycomm.momentum.on_device.table import Table
from pycomm.momentum.scaled import written
from pycomm.policy.rules import CODED

DTYPES = {dtype: core_dtype(dtype) for dtype in CODED}


class DevicePasses:
    """The kernels of a device, for all moments of a state.

    Args:
        kernels: what starts them.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.call, self._device = kernels.call, kernels.device
        self._all: Table | None = None

    @staticmethod
    def find(device: torch.device) -> DevicePasses | None:
        """Return the passes of a device; None: it has no kernels for them."""
        kernels = Kernels.find("moments", device)
        return DevicePasses(kernels) if kernels is not None else None

    def scale(self, moments: Sequence[DeviceMoment], sum_up: Callable[[torch.Tensor], int]) -> None:
        """Make the ranks' sums of this step the scale of the first coding of these moments.

        Args:
            moments: those without second moments.
            sum_up: function that adds a tensor up over the ranks, and returns their number.
        """
        table = Table([(moment, None) for moment in moments])
        sums = torch.empty(table.sums_numel, dtype=torch.float32, device=self._device)
        self.call(table.native.collect, sums.data_ptr())
        ranks = sum_up(sums)
        how = [(_C.MomentUse.scale, 0.0, 0.0)] * len(moments)
        self.call(table.native.commit, sums.data_ptr(), how, ranks)
        for moment in moments:
            moment.knows = True

    def sums_of(self, moments: Sequence[DeviceMoment]) -> torch.Tensor:
        """Return memory for the sums of all moments."""
        count = self._table(moments).sums_numel
        return torch.empty(count, dtype=torch.float32, device=self._device)

    def collect(self, moments: Sequence[DeviceMoment], sums: torch.Tensor) -> None:
        """Write this rank's mean sums of all moments; see `CodedMoment.local_sums`."""
        for moment in moments:
            moment.complete()
        self.call(self._table(moments).native.collect, sums.data_ptr())

    def commit(
        self,
        moments: Sequence[DeviceMoment],
        sums: torch.Tensor | None,
        ranks: int,
        used: Callable[[DeviceMoment], bool],
    ) -> None:
        """Fold the ranks' sums into the second moments, and compute the factors.

        Args:
            moments: all moments.
            sums: the total of what `collect` wrote, over the ranks; None: it did not travel.
            ranks: their number.
            used: function that tells whether a moment's parameter takes part in the step.
        """
        how = []
        for moment in moments:
            if used(moment):
                moment.start()
                moment.complete()
            use = _C.MomentUse.step if used(moment) else _C.MomentUse.nothing
            settings = moment.settings
            how.append((use, float(settings["betas"][1]), float(settings["eps"])))
        at = 0 if sums is None else sums.data_ptr()
        self.call(self._table(moments).native.commit, at, how, ranks)

    def refresh(self, moments: Sequence[DeviceMoment]) -> None:
        """Compute the factors of second moments that were loaded, after `begin`."""
        if not any(moment.is_stale for moment in moments):
            return
        how = [(_C.MomentUse.nothing, 0.0, float(m.settings["eps"])) for m in moments]
        self.call(self._table(moments).native.commit, 0, how, 1)
        for moment in moments:
            moment.is_stale = False

    def move(
        self,
        moments: Sequence[DeviceMoment],
        chosen: Sequence[DeviceMoment],
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
            state, parameter = moment.state, moment.parameter
            assert parameter.grad is not None
            count = state["step"].item() + 1
            state["step"].fill_(count)
            correction = 1 - float(moment.settings["betas"][0]) ** count
            gradient, values = parameter.grad.contiguous(), parameter.detach().contiguous()
            alive += [gradient, values]
            if not parameter.is_contiguous():  # in another memory format
                strided.append((parameter.detach(), values))
            steps.setdefault(parameter.dtype, []).append(
                (
                    *(table.numbers[id(moment)], values.data_ptr(), gradient.data_ptr()),
                    *(lr / correction, 1 - lr * weight_decay, LIMIT * correction, moment.landed),
                )
            )
        for dtype, each in steps.items():
            self.call(table.native.move, each, DTYPES[dtype])
        for parameter, values in strided:
            parameter.copy_(values)
        written([moment.parameter for moment in chosen])

    def _table(self, moments: Sequence[DeviceMoment]) -> Table:
        """Return the table of all moments of the state."""
        known = self._all is not None and len(self._all.parts) == len(moments)
        if self._all is None or not known or not self._all.is_current:
            self._all = Table([(moment, None) for moment in moments])
        return self._all
