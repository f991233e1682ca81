"""What the optimizers share that exchange something else than gradients, in their own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pycomm.arguments import typed
from pycomm.compression import check_takes_hook
from pycomm.hooks.local_gradients import LocalGradients, keep_local
from pycomm.optim.settings import (
    check_dense,
    check_parameters,
    check_settings,
    prepare,
    settings_terms,
)
from pycomm.policy import agree_on_options
from pycomm.policy.names import clean
from pycomm.reduction.state import CompressionState


@dataclass(frozen=True)
class Part:
    """A parameter that takes part in a step."""

    name: str
    parameter: torch.Tensor
    group: dict[str, Any]
    """Its parameter group, with the settings."""

    @property
    def gradient(self) -> torch.Tensor:
        """This rank's own gradient [shape], float32."""
        assert self.parameter.grad is not None
        return self.parameter.grad.float()


class LocalGradientOptimizer(torch.optim.Optimizer):
    """An optimizer for DDP to which each rank brings the gradients of its own data.

    DDP's backward averages nothing. What travels is exchanged by the step, which all ranks take
    together. A step in which a rank's values are not finite is skipped by all, and leaves no trace.

    A subclass implements `_make_state` and `_take`. What is equal on all ranks it keeps in
    ``state``; what each rank has for itself is in `compression`.

    Args:
        params: parameters or groups.
        defaults: settings of groups: lr, betas, weight_decay, perhaps eps.
        model: the DDP model of these parameters.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.
        terms: other options, a line for each, equal on all ranks.
    """

    _step_supports_amp_scaling = True  # `step` skips what overflows, and can tell of a scaler

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None,
        terms: Sequence[str] = (),
    ) -> None:
        who = type(self).__name__
        typed("model", model, nn.Module)
        typed("scaler", scaler, torch.amp.GradScaler, None)
        check_settings(who, defaults)
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_settings(who, group)
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(_refusal(who, model))
        self._scaler = scaler
        self._names = {id(p): clean(name) for name, p in model.module.named_parameters()}
        check_parameters(who, self.param_groups, self._names)
        check_dense(who, self.param_groups, model.module)
        self.process_group: dist.ProcessGroup = model.process_group
        lines = [f"{who}, {'with' if scaler is not None else 'without'} a GradScaler", *terms]
        lines += settings_terms(who, self.param_groups, self._names, tuple(defaults))
        agree_on_options(lines, self.process_group)
        check_takes_hook(model)
        hook = LocalGradients(model, scaled=scaler is not None)
        self.compression = self._make_state()
        """Codecs and what this rank keeps for itself, such as residuals: `summary()`, and
        `state_dict()`, which a checkpoint keeps beside the optimizer's own."""
        self.compression.stays_because = (
            f"{who} keeps momenta that new members do not have: wrap the module in a new "
            f"DistributedDataParallel, make a new {who} and call its adopt_state on all ranks"
        )
        for name, parameter in model.module.named_parameters():
            if any(parameter is p for group in self.param_groups for p in group["params"]):
                self._enter(clean(name), parameter)
        self.compression.agree()
        model.register_comm_hook(hook, keep_local)

    # ------------------------------------------------------------------ for subclasses

    def _make_state(self) -> CompressionState:
        """Return the state of what travels, without parameters."""
        raise NotImplementedError

    def _enter(self, name: str, parameter: torch.Tensor) -> None:
        """Enter a parameter into the state."""
        self.compression.add(name, entered(parameter.shape, parameter.device))

    def _take(self, parts: list[Part]) -> None:
        """Take a step with the parameters that have a gradient; on all ranks."""
        raise NotImplementedError

    def adopt_state(self, previous: LocalGradientOptimizer) -> None:
        """Continue from the optimizer of a group that has lost ranks; collective.

        What is common is that of the first remaining rank; residuals and momenta of its own each
        remaining rank keeps.

        Args:
            previous: the old optimizer, for the same parameters in the same order.
        """
        typed("previous", previous, type(self))
        saved = [previous.state_dict()]
        first = dist.get_global_rank(self.process_group, 0)
        dist.broadcast_object_list(saved, src=first, group=self.process_group)
        self.load_state_dict(saved[0])
        self.compression.adopt_state(previous.compression)

    # ------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step by the gradients of all ranks, which all of them take together.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Raises:
            Error: a GradScaler scaled the gradients, and the optimizer was made without it.
        """
        ready, loss = prepare(self, self._scaler, closure)
        if not ready:
            return loss
        self.compression.follow_members()  # raises if they have changed
        parts = [
            Part(self._names[id(parameter)], parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if parts:
            self._take(parts)
        return loss

    def _exchange(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Average values over the ranks, coded; collective.

        Args:
            values: float32 by parameter name, with as many values as were entered.

        Returns:
            The averages, flat; None: they are not finite, on any rank, and nothing has changed.
        """
        state, overflows = self.compression, self.compression.overflows
        flat = torch.cat([value.reshape(-1) for value in values.values()])
        state.begin_step()
        flat = state.reduce(flat, list(values)).wait()
        state.end_step()
        state.settle()
        if state.overflows > overflows:
            return None
        sizes = [value.numel() for value in values.values()]
        return dict(zip(values, torch.split(flat, sizes), strict=True))

    def _average(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Average values over the ranks exactly; collective. See `_exchange`."""
        flat = torch.cat([value.reshape(-1) for value in values.values()])
        if self.process_group.size() > 1:
            flat.div_(self.process_group.size())  # as DDP does, before the sum
            dist.all_reduce(flat, group=self.process_group)
        if not bool(flat.isfinite().all()):
            return None
        sizes = [value.numel() for value in values.values()]
        return dict(zip(values, torch.split(flat, sizes), strict=True))


def entered(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a float32 tensor that takes no memory, to tell a state what travels."""
    return torch.zeros((), dtype=torch.float32, device=device).expand(tuple(shape))


def _refusal(who: str, model: nn.Module) -> str:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return (
            f"{who} takes a model in DistributedDataParallel: each rank needs the gradients of "
            "whole parameters. For fully_shard use pycomm.CodedAdamW"
        )
    return f"{who} takes a model wrapped in DistributedDataParallel, not {type(model).__name__}"
