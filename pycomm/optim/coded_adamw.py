"""AdamW for data-parallel models whose momentum travels coded; docs/optimizers.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw

from pycomm import _C
from pycomm.arguments import typed, whole
from pycomm.codecs import Codec
from pycomm.compression import attach
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import HookState
from pycomm.hooks.ddp_momentum import DDPMomenta
from pycomm.hooks.fsdp import compress_shards
from pycomm.hooks.fsdp_momentum import ShardedMomenta, check_averages
from pycomm.hooks.momentum import Momenta
from pycomm.momentum.kernels import Kernels, written
from pycomm.momentum.moment import FLOAT32_STATES, local
from pycomm.optim.loading import has_gradient, is_filling, load
from pycomm.optim.optimizer import CodedOptimizer
from pycomm.optim.settings import (
    GroupChecks,
    policy_of,
    prepare,
    rule_of,
    settings_only,
)
from pycomm.policy import Policy, agree_on_options, refused_together
from pycomm.reduction.state import CompressionState

_NAME = "CodedAdamW"


class CodedAdamW(CodedOptimizer):
    """AdamW that exchanges its momentum, in one bit a value or one value of a hundred.

    Feedback on gradients and Adam's momentum are two delays in series, which training does not
    tolerate below two bits. Here the momentum itself is coded, with feedback, so there is one
    delay, and the denominators come from all ranks' gradients, by rows and columns:
    `pycomm.momentum.moment` has the formulas. Parameters of one dimension, and those that
    the policy leaves exact, are treated as torch's AdamW does.

    A rank's gradient counts at most three times its root second moment, and rows of a matrix whose
    gradients are far below the others' move less than with AdamW: docs/optimizers.md, "Long runs".

    Collective: every rank makes one, after the model is wrapped and before the first backward. It
    takes over the gradient exchange of the model, so `pycomm.compress` is not called. After a
    backward, the ``grad`` of a coded parameter is the momentum. A step takes back a number by which
    a parameter's ``grad`` was multiplied since, as `torch.nn.utils.clip_grad_norm_` does: AdamW's
    steps hardly depend on it, and a gradient that is too large is bounded before it is coded.
    Changes of single values, as by `clip_grad_value_`, are changes of the momentum.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        lr: learning rate.
        betas: of momentum and second moment. The coefficient that is used for the momentum is
            smaller than the first: the codec's delay is a part of its horizon.
        eps: added to the denominators.
        weight_decay: decoupled weight decay.
        model: the model of these parameters, in `DistributedDataParallel`, `fully_shard` or
            `replicate`.
        codec: codec of the momentum, its text ("sign", "topk:0.01", "eden:bits=1,scale=mmse",
            "int4"), or a `pycomm.Policy`. Unbiased codecs and PowerSGD are refused.
        refresh: second moments are exchanged every so many steps; 0: so often that they take at
            most an eighth of the momentum's bytes, and every 16 steps at least.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.
        feedback: "residual" with options, such as ``storage=float32``.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        TypeError: the model is in no wrapper, or an argument has another type.
        ValueError: an option is out of range, the codec cannot be used, or a parameter does not
            belong to the model.
        Error: the model has a communication hook already, or torch's FSDP2 sums its gradients
            instead of averaging them.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> optimizer = pycomm.CodedAdamW(
        ...     model.parameters(), lr=2e-3, model=model, codec="sign"
        ... )  # doctest: +SKIP
    """

    _plain = "to_adamw"
    momenta: Momenta

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: nn.Module,
        codec: str | Codec | Policy = "sign",
        refresh: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        feedback: str | Feedback = "residual",
        seed: int = 0,
    ) -> None:
        typed("model", model, nn.Module)
        typed("scaler", scaler, torch.amp.GradScaler, None)
        refresh = whole("refresh", refresh, 0)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
        self._groups: dict[int, dict[str, Any]] = {}
        self._scaler = scaler
        module, groups = model, []
        if _is_ddp(model):
            module, groups = model.module, [model.process_group]
        else:
            groups = check_averages(model)
        with refused_together(*groups):
            policy, rule = policy_of(_NAME, codec), rule_of(_NAME, feedback)
        self._checks = GroupChecks(_NAME, module, defaults)
        self._checks.check(self.param_groups)
        self._ranks = groups
        lines = [f"refresh={refresh}, {'with' if scaler is not None else 'without'} a GradScaler"]
        agree_on_options(lines + self._checks.terms(self.param_groups), *groups)
        kind = DDPMomenta if _is_ddp(model) else ShardedMomenta
        self.momenta = momenta = kind(self._find, self._unit, refresh)
        given: dict[str, Any] = {"feedback": rule, "seed": seed, "transform": momenta}
        if _is_ddp(model):
            wrapped = model

            def make() -> CompressionState:
                state = HookState(policy, wrapped, **given)
                momenta.begin()
                return state

            self.compression = attach(model, make)
        else:
            self.compression = compress_shards(policy, model, **given)
            momenta.begin()
        """Codecs and residuals: `summary()`, `residual_norms()`, and `state_dict()`, which a
        checkpoint keeps beside the optimizer's own."""

    # ------------------------------------------------------------------ for users

    @_disable_dynamo  # a step exchanges values, which no graph has
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step by the momentum of the last backward; on all ranks.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Raises:
            Error: a GradScaler scaled the gradients, and the optimizer was made without it; or DDP
                does not average a parameter that was frozen when the model was wrapped; or a state
                was loaded after the last backward.
            ValueError: a group has a setting or a parameter now with which it cannot be made.
        """
        self._checks.check(self.param_groups)
        ready, loss = prepare(self, self._scaler, closure)
        if not ready:
            return loss
        if is_filling(self) and not self.compression.on_any_rank(has_gradient(self)):
            self._fill()
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.momenta.check_reduced(self._checks.names[id(parameter)], parameter)
        self.momenta.take_sums()
        coded = {id(moment.parameter): moment for moment in self.momenta.moments.values()}
        for one in coded.values():
            if one.parameter.grad is not None:
                self.state[one.parameter] = one.state
        for group in self.param_groups:
            lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
            exact, moments = [], []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = coded.get(id(parameter))
                if moment is None:
                    exact.append(parameter)
                else:
                    moments.append(moment)
            self.momenta.move(moments, lr, weight_decay)
            if exact:
                self._step_exact(group, exact)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as `torch.optim.AdamW` does; each number has memory of its own."""
        saved = super().state_dict()
        saved["state"] = {
            key: {name: _alone(value) for name, value in state.items()}
            for key, state in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of ranks, or torch's AdamW.

        The squares of gradients since the last exchange are not a part of the state: up to
        `refresh` steps of them begin anew.

        Raises:
            ValueError: other groups, or parameters that were coded and are not, or the reverse.
        """
        self.momenta.drop_step()
        load(self, state_dict, FLOAT32_STATES)
        self._factor()
        self._rebind()
        coded = {id(moment.parameter) for moment in self.momenta.moments.values()}
        for parameter, state in self.state.items():
            if id(parameter) not in coded and "row" in state:
                raise ValueError(
                    f"the state of a parameter of shape {tuple(parameter.shape)} is that of a "
                    "coded one, and here it is exact: use the codec or policy that was saved"
                )

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take copies of the state of torch's AdamW for the same parameters.

        A `state_dict` of a `CodedAdamW` that was loaded there is taken, too.
        """
        for parameter, state in optimizer.state.items():
            self.state[parameter] = {
                # Torch has given them the dtype of the parameter.
                key: value.to(torch.float32 if key in FLOAT32_STATES else value.dtype, copy=True)
                for key, value in state.items()
            }
        self._factor()
        self._rebind()

    def _factor(self) -> None:
        """Make states of torch's AdamW, which have full second moments, those of coded moments."""
        for moment in self.momenta.moments.values():
            self.momenta.factor(moment, self.state.get(moment.parameter, {}))

    def adopt_state(self, previous: CodedAdamW) -> None:  # type: ignore[override]
        """See `CodedOptimizer`.

        Raises:
            ValueError: the model is in `fully_shard` or `replicate`.
        """
        if not isinstance(self.momenta, DDPMomenta):
            raise ValueError(
                "CodedAdamW adopts states of models in DistributedDataParallel, since shards of "
                "lost ranks are gone with them; go on from a checkpoint, with load_checkpoint"
            )
        super().adopt_state(previous)

    def to_adamw(self, **options: Any) -> torch.optim.AdamW:
        """Return torch's AdamW with the same groups and state; this optimizer remains as it is.

        Second moments become full ones, of rank one. The model's gradients still travel as
        momentum: wrap the module in a new DistributedDataParallel to train with the result.

        Args:
            options: other options of `torch.optim.AdamW`, such as ``fused=True``.
        """
        adamw_ = torch.optim.AdamW(settings_only(self), **options)
        for moment in self.momenta.moments.values():
            if self.state.get(moment.parameter):
                adamw_.state[moment.parameter] = moment.unfactored()
        for parameter, state in self.state.items():
            if parameter not in adamw_.state:
                adamw_.state[parameter] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state.items()
                }
        return adamw_

    # ------------------------------------------------------------------ parts of a step

    def _fill(self) -> None:
        """Make the states of parameters that have a gradient, as a template for a checkpoint."""
        self.momenta.drop_step()
        coded = {id(moment.parameter): moment for moment in self.momenta.moments.values()}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            if (moment := coded.get(id(parameter))) is None:
                self._start_exact(parameter)
            else:
                moment.start()
                self.state[parameter] = moment.state

    def _start_exact(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _step_exact(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            self._start_exact(parameter)
        states = [self.state[parameter] for parameter in parameters]
        step_by_adamw(
            group,
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]
            states,
            as_torch=not self.momenta.moments,
        )

    def _enter(self, groups: list[dict[str, Any]]) -> None:
        self._groups.clear()
        self.momenta.take_added()

    def _unit(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def _rebind(self) -> None:
        """Let the moments use the groups and states that are now the optimizer's."""
        self._groups.clear()
        for moment in self.momenta.moments.values():
            settings, state = self._find(moment.parameter) or ({}, {})
            moment.rebind(settings, state)
        steps = [int(state["step"]) for state in self.state.values() if "step" in state]
        self.momenta.steps = max(steps, default=0)

    def _find(self, parameter: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return a parameter's group and state; None: it is not optimized."""
        if not self._groups:
            self._groups = {id(p): group for group in self.param_groups for p in group["params"]}
        group = self._groups.get(id(parameter))
        # Looked up without making an entry: torch takes an optimizer with entries for one that has
        # stepped, and a checkpoint could not be loaded into it.
        state = self.state.get(parameter, {})
        return None if group is None else (group, state)


def _is_ddp(model: nn.Module) -> TypeGuard[DistributedDataParallel]:
    if isinstance(model, DistributedDataParallel):
        return True
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    raise TypeError(
        "CodedAdamW takes a model wrapped in DistributedDataParallel or fully_shard, not "
        f"{type(model).__name__}"
    )


def _alone(value: Any) -> Any:
    """Return a value of a state; of a number, which may be part of a larger memory, a copy."""
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


def step_by_adamw(
    settings: Mapping[str, Any],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    *,
    as_torch: bool,
) -> None:
    """Take a step of torch's AdamW with parameters of one group.

    float32 goes over each tensor once, all tensors in one call: in C++ on the CPU
    (csrc/optim/adamw.cpp), and by kernels with the same bits; everything else by torch. A shard's
    values have the bits that they have in the whole.

    Args:
        settings: the group.
        parameters: the parameters, or this rank's shards.
        gradients: one for each parameter.
        states: likewise.
        as_torch: with the bits of `torch.optim.AdamW` itself, where nothing is coded.
    """
    beta1, beta2 = settings["betas"]
    momenta = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    steps = [state["step"] for state in states]
    tensors = parameters, gradients, momenta, squares
    if not as_torch and _is_known(tensors, steps):
        kernels = Kernels.find("adamw", momenta[0].device)
        kernels.call(
            _C.adamw_step if kernels.on_host else _C.adamw_step_on_device,
            [
                (*(tensor.data_ptr() for tensor in each), each[0].numel())
                for each in zip(*tensors, steps, strict=True)
            ],
            *(float(settings["lr"]), float(beta1), float(beta2)),
            *(float(settings["eps"]), float(settings["weight_decay"])),
        )
        written(parameters)
        return
    adamw(
        list(parameters),
        list(gradients),
        momenta,
        squares,
        [],
        steps,
        # Torch's fused kernel has other bits at the ends of shards. None: the default of torch.
        foreach=None if as_torch else True,
        amsgrad=False,
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(settings["lr"]),
        weight_decay=float(settings["weight_decay"]),
        eps=float(settings["eps"]),
        maximize=False,
    )


def _is_known(tensors: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor]) -> bool:
    """Return whether C++ takes these tensors, by their addresses."""
    device = tensors[0][0].device
    for one in chain(*tensors, steps):
        if one.dtype != torch.float32 or not one.is_contiguous() or one.is_neg():
            return False
    return all(one.device == device for one in chain(*tensors)) and all(one.is_cpu for one in steps)
