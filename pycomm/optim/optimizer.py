"""What optimizers have in common whose momentum travels coded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arguments import typed
from pycomm.errors import Error
from pycomm.optim.settings import GroupChecks
from pycomm.policy import agree_on_options
from pycomm.policy.exchange import device_of
from pycomm.reduction import members
from pycomm.reduction.state import CompressionState
from pycomm.reduction.transform import Transform


class CodedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of one wrapped model, whose steps all ranks take together."""

    _step_supports_amp_scaling = True  # `step` skips what overflows, and can tell of a scaler
    _plain: str
    """Name of the method that returns an optimizer of torch."""
    _checks: GroupChecks
    _ranks: list[dist.ProcessGroup]
    """Groups of ranks with equal settings."""
    compression: CompressionState
    """Codecs and residuals."""
    momenta: Transform
    """What travels in place of the gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; collective, between two steps.

        Raises:
            ValueError: a setting is out of range, or a parameter does not belong to the model.
            WireMismatch: ranks add groups with different settings or parameters; on all ranks.
        """
        super().add_param_group(param_group)
        if not hasattr(self, "compression"):  # the constructor treats all groups at once
            return
        added = self.param_groups[-1:]
        try:
            self._check(added)
            agree_on_options(self._checks.terms(added), *self._ranks)
        except Exception:
            self.param_groups.pop()
            raise
        self._enter(added)

    def _check(self, groups: list[dict[str, Any]]) -> None:
        """Check settings and parameters of groups."""
        self._checks.check(groups)

    def adopt_state(self, previous: CodedOptimizer) -> None:
        """Continue from the optimizer of a group that has lost ranks; collective.

        Momenta and what else is equal on all ranks are those of the first remaining rank, residuals
        those of each remaining rank; see `CompressionState.adopt_state`.

        Args:
            previous: the old optimizer, for the same parameters in the same order.
        """
        typed("previous", previous, type(self))
        group = self.compression.process_group
        saved = members.broadcast_object(previous.state_dict(), 0, group, device_of(group))
        self.load_state_dict(saved)
        self.compression.adopt_state(previous.compression)

    @abstractmethod
    def _enter(self, groups: list[dict[str, Any]]) -> None:
        """Let the parameters of groups travel; collective."""

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy, and a pickle: the exchange belongs to one model.

        Raises:
            Error: always.
        """
        raise Error(
            f"{type(self).__name__} cannot be copied or pickled, since it exchanges the momentum "
            "of one wrapped model: keep its state_dict(), or copy what its "
            f"{self._plain}() returns"
        )
