"""The coded momentum of a parameter on a device with kernels."""

from __future__ import annotations

from typing import Any

import torch

from pycomm import _C
from pycomm.momentum import agreement
from pycomm.momentum.moment import EXTRA, CodedMoment

assert EXTRA == _C.MOMENT_EXTRA
# Places in Numbers of csrc/optim/moments_params.h.
_STATES = {"moment_weight": 0, "coding_error": 1, "mean_energy": 2, "own_energy": 3}
_STEPS, _DECAY = 4, slice(8, 10)


class DeviceMoment(CodedMoment):
    """The momentum of a parameter on a device with kernels.

    Numbers of its state are views of memory of the device; reading one waits for it. Arguments are
    those of `CodedMoment`; each rank has the whole parameter.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        device, factors = self.parameter.device, [self.rows, self.columns] * 2
        sizes = [_C.MOMENT_NUMBERS, self.sums_numel, self.sums_numel, *factors]
        self.room = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.numbers, self._fresh, self._since, *_ = torch.split(self.room, sizes)
        self._of_step = self._fresh[: self.rows], self._fresh[self.rows : -EXTRA]
        self._views = {name: self.numbers[at] for name, at in _STATES.items()}
        self._restart()
        self._signs = agreement.table(self.columns, device)
        self.turn = (0, 0, 1)
        """Of this step: address of the signs, and the first row and the distance of those that
        have a projection; see `agreement`."""
        self._has_weight = False
        self.knows = False
        """There is a second moment by which to divide; see `has_scale`."""
        self.entered = False
        """Kernels have written the sums of this backward."""
        self.landed = False
        """Kernels have made the gradient the momentum, and have looked at it."""
        self.is_stale = True
        """The factors are not those of the second moments."""

    def _restart(self) -> None:
        """Begin to count the steps since an exchange."""
        self.numbers[_STEPS] = 0
        self.numbers[_DECAY].view(torch.float64).fill_(1.0)

    def start(self) -> None:
        """See `CodedMoment`; numbers that were loaded come to the device."""
        super().start()
        for name, view in self._views.items():
            if self.state[name] is not view:
                view.copy_(self.state[name])
                self.state[name] = view

    def rebind(self, settings: dict[str, Any], state: dict[str, Any]) -> None:
        """See `CodedMoment`."""
        super().rebind(settings, state)
        self._restart()
        self._has_weight, self.is_stale = False, True

    def begin(self) -> None:
        """See `CodedMoment`; the host waits for the device until there is a second moment."""
        self.start()
        self.landed = self.entered = False
        self._has_weight = self._has_weight or float(self.state["moment_weight"]) > 0
        self.knows = self._has_weight
        step = int(self.state["step"])
        first, stride, _ = agreement.turn(0, self.rows, step)
        signs = self._signs.data_ptr() + 4 * agreement.place_of_signs(step)
        self.turn = signs, first, stride

    def complete(self) -> None:
        """Make the sums of a backward that had nothing of the parameter zeros."""
        if not self.entered:
            self._fresh.zero_()
            self.entered = True
