"""What optimizers have in common whose momentum travels coded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pycomm.arguments import number, typed, whole
from pycomm.codecs import Codec
from pycomm.compression import attach
from pycomm.elastic.contents import plain_numbers
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import HookState
from pycomm.hooks.fsdp import check_averages, compress_shards
from pycomm.hooks.momentum import OTHERS, Momenta
from pycomm.momentum.moment import FLOAT32_STATES, CodedMoment, local
from pycomm.policy import Policy, agree_on_options, refused_together
from pycomm.policy.exchange import device_of
from pycomm.policy.names import clean
from pycomm.reduction import members
from pycomm.reduction.refusals import MOMENTA, refused
from pycomm.reduction.state import CompressionState

_OFF = ("amsgrad", "nesterov", "dampening", "maximize", "capturable", "differentiable")
"""Options of torch's optimizers that coded ones do not have."""


def plain(setting: Any) -> Any:
    """Return a setting; the number of a tensor with one value, which torch takes as a rate."""
    return setting.item() if isinstance(setting, torch.Tensor) and setting.numel() == 1 else setting


def check_settings(who: str, settings: dict[str, Any]) -> None:
    """Check the settings of a parameter group: lr and weight_decay, and what else there is.

    Raises:
        TypeError: one is no number.
        ValueError: one is out of its range, or an option is on that the optimizer has not.
    """
    if wrong := [name for name in _OFF if settings.get(name)]:
        option = "`nesterov`, `dampening`, `amsgrad`, `maximize`, `capturable`"
        raise ValueError(f"{who} {refused(MOMENTA, option, name=wrong[0])}")
    names = [name for name in ("lr", "eps", "weight_decay") if name in settings]
    numbers = {name: number(name, plain(settings[name])) for name in names}
    betas = settings.get("betas", (0.0, 0.0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{who}: betas={betas!r}: give two numbers")
    if not all(0 <= number("betas", beta) < 1 for beta in betas):
        raise ValueError(f"{who}: betas={betas}: each is from 0 to below 1")
    if not 0 <= number("momentum", settings.get("momentum", 0.0)) < 1:
        raise ValueError(f"{who}: momentum={settings['momentum']} must be from 0 to below 1")
    if not all(math.isfinite(x) and x >= 0 for x in numbers.values()):
        given = ", ".join(f"{name}={value}" for name, value in numbers.items())
        raise ValueError(f"{who}: {given} must be finite and at least 0")


class CodedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of one wrapped model, whose steps all ranks take together.

    Args:
        params: parameters or groups.
        defaults: settings of groups that have none of their own.
        model, codec, refresh, scaler, feedback, seed: as for `CodedAdamW`.
    """

    _step_supports_amp_scaling = True  # `step` skips what overflows, and can tell of a scaler
    _moment: ClassVar[type[CodedMoment]]
    """What is kept of a coded parameter, and how it moves."""
    _torch: ClassVar[type[torch.optim.Optimizer]]
    """The same optimizer of torch, which exchanges nothing."""
    _exact: ClassVar[tuple[str, ...]]
    """What it keeps of a parameter that travels exactly."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        model: nn.Module,
        codec: str | Codec | Policy,
        refresh: int,
        scaler: torch.amp.GradScaler | None,
        feedback: str | Feedback,
        seed: int,
    ) -> None:
        name = self._moment.optimizer
        typed("model", model, nn.Module)
        typed("scaler", scaler, torch.amp.GradScaler, None)
        refresh = whole("refresh", refresh, 0)
        super().__init__(params, defaults)
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
        self._groups: dict[int, dict[str, Any]] = {}
        self._scaler = scaler
        wrapped = model if isinstance(model, DistributedDataParallel) else None
        if not wrapped and not any(isinstance(part, FSDPModule) for part in model.modules()):
            raise TypeError(
                f"{name} takes a model wrapped in DistributedDataParallel or fully_shard, not "
                f"{type(model).__name__}"
            )
        module = wrapped.module if wrapped else model
        groups = [wrapped.process_group] if wrapped else check_averages(model, name)
        with refused_together(*groups):
            policy, rule = Momenta.policy_of(codec), Feedback.of(feedback)
            if rule is None or rule.kind != "residual":
                why = refused(MOMENTA, "feedback but `residual`", feedback=feedback)
                raise ValueError(f"{name}: {why}")
        self._settings = tuple(defaults)  # torch adds others to `self.defaults` later
        self._names = {id(p): clean(name) for name, p in module.named_parameters()}
        self._sparse = {
            id(part.weight): name or type(part).__name__
            for name, part in module.named_modules()
            if getattr(part, "sparse", False) and hasattr(part, "weight")
        }
        self._check_groups(self.param_groups)
        with_scaler = "with" if scaler is not None else "without"
        lines = [f"{name}, refresh={refresh}, {with_scaler} a GradScaler"]
        agree_on_options(lines + self._terms(self.param_groups), *groups)
        self.momenta = Momenta(self._moment, self._find, self._unit, refresh)
        """What travels in place of the gradients."""
        given: dict[str, Any] = {"feedback": rule, "seed": seed, "transform": self.momenta}
        if wrapped:

            def make(wrapped: DistributedDataParallel = wrapped) -> CompressionState:
                state = HookState(policy, wrapped, **given)
                self.momenta.begin()
                return state

            self.compression = attach(wrapped, make)
        else:
            self.compression = compress_shards(policy, model, **given)
            self.momenta.begin()
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
        self._check_groups(self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overflows():
            return loss
        if self._may_fill() and not self.compression.on_any_rank(self._has_gradient()):
            self._fill()
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.momenta.check_reduced(self._names[id(parameter)], parameter)
        self.momenta.take_sums()
        moments = self.momenta.moments
        coded = {id(moment.parameter): moment for moment in moments.values()}
        idle = {id(moments[n].parameter) for n in self.momenta.reducer.step.unused & moments.keys()}
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None and id(p) not in idle]
            used = [coded[id(parameter)] for parameter in given if id(parameter) in coded]
            exact = [parameter for parameter in given if id(parameter) not in coded]
            for moment in used:
                self.state[moment.parameter] = moment.state
            self.momenta.move(used, float(group["lr"]), float(group["weight_decay"]))
            for parameter in exact:
                self._start_exact(parameter)
            if exact:
                self._step_exact(group, exact)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's optimizer does; each number has memory of its own."""
        saved = super().state_dict()
        saved["state"] = {
            key: {name: _alone(value) for name, value in state.items()}
            for key, state in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of ranks, or torch's optimizer.

        The squares of gradients since the last exchange are not a part of the state: up to
        `refresh` steps of them begin anew.

        Raises:
            ValueError: other groups, or parameters that were coded and are not, or the reverse.
        """
        self._load(state_dict)
        for state in self.state.values():  # of torch's SGD, before there is a momentum
            for key in [key for key, value in state.items() if value is None]:
                del state[key]
        self.momenta.drop_step()
        self._factor()
        self._rebind()

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take copies of the state of torch's optimizer for the same parameters.

        A `state_dict` of a coded optimizer that was loaded there is taken, too.
        """
        for parameter, state in optimizer.state.items():
            self.state[parameter] = {
                # Torch has given them the dtype of the parameter.
                key: value.to(torch.float32 if key in FLOAT32_STATES else value.dtype, copy=True)
                for key, value in state.items()
                if value is not None  # of torch's SGD, before there is a momentum
            }
        self._factor()
        self._rebind()

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
            self._check_groups(added)
            agree_on_options(self._terms(added), *self.compression.plan.groups)
        except Exception:
            self.param_groups.pop()
            raise
        self._groups.clear()
        self.momenta.take_added()

    def adopt_state(self, previous: CodedOptimizer) -> None:
        """Continue from the optimizer of a group that has lost ranks; collective.

        Momenta and what else is equal on all ranks are those of the first remaining rank, residuals
        those of each remaining rank; see `CompressionState.adopt_state`.

        Args:
            previous: the old optimizer, for the same parameters in the same order.

        Raises:
            ValueError: the model is in `fully_shard` or `replicate`.
        """
        if self.compression.adapter.early:
            raise ValueError(refused(MOMENTA, "survivors that adopt a state, but in DDP"))
        typed("previous", previous, type(self))
        group = self.compression.process_group
        saved = members.broadcast_object(previous.state_dict(), 0, group, device_of(group))
        self.load_state_dict(saved)
        self.compression.adopt_state(previous.compression)

    def _to_torch(self, **options: Any) -> Any:
        """Return torch's optimizer with the same groups and state; this one remains as it is."""
        # Without settings that another optimizer has left in the groups.
        keys = ("params", "param_names", "initial_lr", *self.defaults)
        groups = [{k: group[k] for k in keys if k in group} for group in self.param_groups]
        plain = self._torch(groups, **options)
        for moment in self.momenta.moments.values():
            if self.state.get(moment.parameter):
                plain.state[moment.parameter] = moment.as_torch()
        for parameter, state in self.state.items():
            if parameter not in plain.state:
                plain.state[parameter] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state.items()
                }
        return plain

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy, and a pickle: the exchange belongs to one model.

        Raises:
            Error: always.
        """
        raise Error(f"{type(self).__name__} {refused(MOMENTA, 'copies')}")

    # ------------------------------------------------------------------ groups

    def _check_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Check settings and parameters of groups; numbers of numpy become Python's.

        Raises:
            TypeError: a setting is no number.
            ValueError: a setting is out of its range, or a parameter is not the model's or has
                sparse gradients.
        """
        who = self._moment.optimizer
        for group in groups:
            check_settings(who, group)
            group.update({key: plain_numbers(group[key]) for key in self._settings})
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise ValueError(
                        f"{who}: a parameter of shape {tuple(parameter.shape)} does not belong to "
                        "the model: pass the model that was wrapped, and its own parameters; if "
                        "the model has got another one since, wrap it anew, and make the optimizer "
                        "anew"
                    )
                if id(parameter) in self._sparse:
                    why = refused(MOMENTA, "sparse gradients", name=self._sparse[id(parameter)])
                    raise ValueError(f"{who}: {why}")

    def _terms(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """Return the settings of groups and their parameters, which are equal on all ranks."""
        settings = [{key: plain(group[key]) for key in self._settings} for group in groups]
        return [
            f"group {i} of {self._moment.optimizer}: {settings[i]} of "
            + ",".join(self._names[id(p)] for p in group["params"])
            for i, group in enumerate(groups)
        ]

    # ------------------------------------------------------------------ parts of a step

    def _overflows(self) -> bool:
        """Return whether a GradScaler has found an overflow; else unscale the gradients, if it
        leaves that to us.

        Raises:
            Error: the optimizer was made without it.
        """
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and self._scaler is None:
            why = refused(MOMENTA, "a GradScaler that they do not know")
            raise Error(f"rank {self.compression.process_group.rank()}: {why}")
        if found_inf is not None and float(found_inf):
            return True
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients = (p.grad for group in self.param_groups for p in group["params"])
            torch._foreach_mul_([one for one in gradients if one is not None], 1.0 / float(scale))
        return False

    def _factor(self) -> None:
        """Make states of torch's optimizer those of coded moments."""
        for moment in self.momenta.moments.values():
            self.momenta.factor(moment, self.state.get(moment.parameter, {}))

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's optimizer does, with two differences.

        Torch gives every state but ``step`` the dtype and the device of its parameter; here
        `FLOAT32_STATES` stay float32, and numbers stay on the CPU. And the optimizer keeps its
        groups, with other settings, since schedulers may hold them that were made for another
        optimizer (`pycomm.code_optimizer`).
        """
        given: dict[str, Any] = {}

        def take(_: Any, state: dict[str, Any]) -> None:
            self._check_coded(state)
            given.update(state)

        # Registered last: it sees the state as other hooks have changed it.
        handle = self.register_load_state_dict_pre_hook(take)
        groups = self.param_groups
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, loaded in zip(groups, self.param_groups, strict=True):
            settings = dict(loaded)
            group.clear()
            group.update(settings)
        self.param_groups = groups
        for parameter, state in self._states_in(given):
            for key, value in state.items():
                if key in FLOAT32_STATES:
                    device = local(parameter).device if value.ndim else torch.device("cpu")
                    exact = value.detach().to(device, torch.float32, copy=True)
                    self.state[parameter][key] = exact

    def _states_in(self, given: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Yield the parameters with their states in what `state_dict` has returned."""
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for place, parameter in zip(numbers, parameters, strict=False):
            yield parameter, given["state"].get(place, {})

    def _check_coded(self, given: dict[str, Any]) -> None:
        """Check what `state_dict` has returned, before it takes the place of the state of now.

        Raises:
            ValueError: it has the state of a coded parameter for one that is exact here.
        """
        coded = {id(moment.parameter) for moment in self.momenta.moments.values()}
        for parameter, state in self._states_in(given):
            decision = self.compression.decisions.get(self._names[id(parameter)])
            # A group that was added after a backward is coded from the next step on.
            follows = decision is not None and decision.parameter.exact == OTHERS
            if "row" in state and id(parameter) not in coded and not follows:
                raise ValueError(
                    f"the state of a parameter of shape {tuple(parameter.shape)} is that of a "
                    "coded one, and here it is exact: use the codec or policy that was saved"
                )

    def _may_fill(self) -> bool:
        """Return whether a step may be that by which torch.distributed.checkpoint makes states.

        It steps a new optimizer with gradients and learning rates of zero. Ranks that find this
        true have to agree, since a rank's gradients may be zero by chance.
        """
        return not self.state and not any(float(group["lr"]) for group in self.param_groups)

    def _has_gradient(self) -> bool:
        """Return whether a gradient of this rank has a value that is not zero."""
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return any(bool(local(grad).any()) for grad in gradients if grad is not None)

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
        """Fill the state of a parameter that travels exactly, if it is empty."""
        state = self.state[parameter]
        if self._moment.key not in state:
            for key in self._exact:
                number = torch.zeros((), dtype=torch.float32, device="cpu")
                state[key] = number if key == "step" else torch.zeros_like(parameter)

    @abstractmethod
    def _step_exact(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Move parameters of a group by their mean gradients, with the bits of torch."""

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


def _alone(value: Any) -> Any:
    """Return a value of a state; of a number, which may be part of a larger memory, a copy."""
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value
