"""The state of optimizers whose ranks keep a tensor of their own for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm.reduction.state import CompressionState


class OwnState(CompressionState):
    """Codecs of what travels, and what each rank keeps for itself.

    Args:
        codec, options: as for `CompressionState`.
    """

    def __init__(self, *codec: Any, **options: Any) -> None:
        super().__init__(*codec, **options)
        self.own: dict[str, torch.Tensor] = {}
        """This rank's tensors, by parameter name: float32 [shape]."""

    def adopt_state(self, previous: CompressionState | None) -> None:
        """See `CompressionState`: a rank keeps its own."""
        super().adopt_state(previous)
        if isinstance(previous, type(self)):
            self.own = {name: value.clone() for name, value in previous.own.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `CompressionState`; also has what this rank keeps for itself."""
        own = {name: value.clone() for name, value in self.own.items()}
        return {**super().state_dict(), f"own{dist.get_rank()}": (self.step, own)}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """See `CompressionState`. On another number of ranks each takes the mean of the tensors."""
        super().load_state_dict(*states)
        saved = {key: value for state in states for key, value in state.items()}
        (about,) = saved["about"]
        keys = self._needed_besides(about["world_size"])
        if missing := [key for key in keys if key not in saved]:
            raise ValueError(
                f"each rank has a momentum of its own, and this state has no {', '.join(missing)}"
            )
        parts = [saved[key][1] for key in keys]
        self.own = {
            name: torch.stack([part[name] for part in parts if name in part]).mean(0)
            for name in dict.fromkeys(name for part in parts for name in part)
        }

    def _needed_besides(self, before: int) -> list[str]:
        if before == self.process_group.size():
            return [f"own{dist.get_rank()}"]
        return [f"own{rank}" for rank in range(before)]
