"""Units of residuals: they scale with the loss scale and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pycomm.feedback import Residuals


class Rates:
    """Learning rates and loss scale under which residuals were written; see `CompressionState`."""

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        """The optimizer whose learning rates are followed, by parameter group."""
        self.scaler: torch.amp.GradScaler | None = None
        """The scaler whose loss scale is followed."""
        self.learning: dict[str, float] = {}
        """The learning rate of each parameter's residual, by name."""
        self.loss_scale = 0.0
        """The loss scale of all residuals; 0: there are none yet."""

    def rescale(self, residuals: Residuals, names: Mapping[int, str]) -> None:
        """Rescale the residuals to the units of the step that begins.

        A learning rate of 0 moves nothing, so it is ignored.

        Args:
            residuals: residuals of the model.
            names: names of the parameters, by id.
        """
        if self.scaler is not None and (now := self.scaler.get_scale()) > 0:
            if self.loss_scale not in (0.0, now):
                residuals.scale(now / self.loss_scale, momentum=True)
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
        """Return the state to checkpoint."""
        return {"rates": dict(self.learning), "loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; other entries are ignored."""
        self.learning, self.loss_scale = dict(state["rates"]), state["loss_scale"]
