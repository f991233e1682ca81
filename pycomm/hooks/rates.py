"""The units of what is owed: of the loss scale, worth what the learning rate makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pycomm.feedback import Residuals


class Rates:
    """Learning rates and loss scale under which residuals were written; see `CompressionState`."""

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        """Its learning rates are followed, by parameter group."""
        self.scaler: torch.amp.GradScaler | None = None
        """Its loss scale is followed."""
        self.learning: dict[str, float] = {}
        """By parameter: the learning rate of its residual."""
        self.loss_scale = 0.0
        """Of all residuals; 0: there are none yet."""

    def rescale(self, residuals: Residuals, names: Mapping[int, str]) -> None:
        """Rescale what is owed to the units of the step that begins.

        A learning rate of 0 moves nothing, so it does not count.

        Args:
            residuals: of the model.
            names: by id of the parameter.
        """
        if self.scaler is not None and (now := self.scaler.get_scale()) > 0:
            if self.loss_scale not in (0.0, now):
                residuals.scale_units(now / self.loss_scale)
            self.loss_scale = now
        for group in self.optimizer.param_groups if self.optimizer else ():
            rate = float(group["lr"])
            for name in [names[id(p)] for p in group["params"] if id(p) in names]:
                if rate <= 0:
                    continue
                before = self.learning.setdefault(name, rate)
                if before != rate:
                    residuals.scale(before / rate, [name])
                    self.learning[name] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"rates": dict(self.learning), "loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; other entries of the state are not looked at."""
        self.learning, self.loss_scale = dict(state["rates"]), state["loss_scale"]
