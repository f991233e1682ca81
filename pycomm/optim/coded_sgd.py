"""SGD for data-parallel models whose momentum travels coded; docs/optimizers.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.compression import check_takes_hook
from pycomm.feedback import Feedback, Residual
from pycomm.feedback.rule import EXACT
from pycomm.hooks.ddp import compress_hook
from pycomm.hooks.sent_momentum import SentMomenta
from pycomm.momentum.moment import shortened
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
from pycomm.policy.exchange import answer, device_of
from pycomm.policy.names import clean
from pycomm.policy.quality import nominal_error
from pycomm.reduction.state import CompressionState

MEASURED_EVERY = 16
"""Steps from one measurement of the codings' errors to the next; two numbers of each parameter."""
_NAME = "CodedSGD"


@dataclass(frozen=True)
class Part:
    """A parameter that takes part in a step."""

    name: str
    parameter: torch.Tensor
    group: dict[str, Any]
    """Its parameter group, with the settings."""

    @property
    def gradient(self) -> torch.Tensor:
        """This rank's own gradient [shape], float32; zero if only other ranks have one."""
        if self.parameter.grad is None:
            return torch.zeros_like(self.parameter, dtype=torch.float32)
        return self.parameter.grad.float()


class CodedSGD(CodedOptimizer):
    """SGD whose momentum travels coded, in one bit a value or one value of a hundred.

    Feedback on gradients and momentum are two delays in series; here the momentum itself is coded,
    so there is one. With g a rank's gradient, o what it has sent of the momentum, and e its
    residual, a step is

        p = b o + (1 - b) / (1 - momentum) (g + wd x) + e;  q = C(p);  e <- p - q;  o <- q
        x <- x - lr mean(q)

    where b is smaller than `momentum`: the codec's delay is a part of its horizon, as for
    `pycomm.CodedAdamW`. mean(q) is torch's momentum buffer, in the state under the same name, and
    o and e are in its unit, so that a schedule may change `momentum` as with torch. Where nothing
    is coded, as for norms and biases by the default policy, the mean gradient travels, and a step
    is that of `torch.optim.SGD`. Source: Tang et al. 2021, "1-bit Adam", arXiv 2102.02888,
    algorithm 1, without its denominators.

    Collective: every rank makes one, after the model is wrapped and before the first backward. DDP
    averages no gradients any more: after a backward each rank has those of its own data, and
    clipping bounds them rank by rank. What travels is exchanged by the step, which all ranks take
    together. A step in which a rank's values are not finite is skipped by all, and leaves no trace.
    Where a parameter has a gradient on some ranks only, those of the others count as zero.

    Args:
        params: parameters or groups, as for `torch.optim.SGD`.
        lr: learning rate.
        momentum: from 0 to below 1. There is no dampening, and Nesterov's form is not offered,
            since no rank knows the mean gradient.
        weight_decay: added to the gradients, times the parameters.
        model: the model of these parameters, in `DistributedDataParallel`.
        codec: codec of the momentum, its text ("sign", "topk:0.01", "eden:bits=1,scale=mmse",
            "int4"), or a `pycomm.Policy`. Unbiased codecs and PowerSGD are refused.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.
        feedback: "residual" with options, such as ``storage=float32``.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        TypeError: the model is not in DDP, or an argument has another type.
        ValueError: an option is out of range, the codec cannot be used, or a parameter does not
            belong to the model.
        Error: the model has a communication hook already.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> optimizer = pycomm.CodedSGD(
        ...     model.parameters(), lr=0.1, momentum=0.9, model=model, codec="sign"
        ... )  # doctest: +SKIP
    """

    _plain = "to_sgd"
    momenta: SentMomenta

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        model: nn.Module,
        codec: str | Codec | Policy = "sign",
        scaler: torch.amp.GradScaler | None = None,
        feedback: str | Feedback = "residual",
        seed: int = 0,
    ) -> None:
        typed("model", model, nn.Module)
        typed("scaler", scaler, torch.amp.GradScaler, None)
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(_refusal(model))
        with refused_together(model.process_group):
            policy, rule = policy_of(_NAME, codec), rule_of(_NAME, feedback)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._scaler = scaler
        self._codecs: dict[str, Codec] = {}  # of the steps before, by parameter
        self._used: set[int] = set()  # ids of the parameters that take part in this step
        self._checks = GroupChecks(_NAME, model.module, defaults)
        self._ignored = set(map(clean, model.parameters_to_ignore))
        self._check(self.param_groups)
        self.process_group: dist.ProcessGroup = model.process_group
        self._ranks = [self.process_group]
        lines = [f"{_NAME}, {'with' if scaler is not None else 'without'} a GradScaler"]
        lines += self._checks.terms(self.param_groups)
        agree_on_options(lines, self.process_group)
        check_takes_hook(model)
        self.momenta = SentMomenta()
        options: dict[str, Any] = {"feedback": rule, "seed": seed, "transform": self.momenta}
        self.compression = CompressionState(policy, process_group=self.process_group, **options)
        """Codecs and what this rank keeps for itself, residuals and what it has sent: `summary()`,
        and `state_dict()`, which a checkpoint keeps beside the optimizer's own."""
        self.compression.stays_because = (
            "CodedSGD keeps momenta that new members do not have: wrap the module in a new "
            "DistributedDataParallel, make a new CodedSGD and call its adopt_state on all ranks"
        )
        self._enter(self.param_groups)
        model.register_comm_hook(self.compression, compress_hook)

    def _check(self, groups: list[dict[str, Any]]) -> None:
        """See `CodedOptimizer`: the step averages all parameters, also those that DDP ignores."""
        super()._check(groups)
        for group in groups:
            for name in (self._checks.names[id(p)] for p in group["params"]):
                if name in self._ignored:
                    raise ValueError(
                        f"CodedSGD: DistributedDataParallel ignores {name}, which ranks are to "
                        "have for themselves: give it to another optimizer"
                    )

    def _enter(self, groups: list[dict[str, Any]]) -> None:
        added = {id(p) for group in groups for p in group["params"]}
        self.momenta.owned |= added
        for name, parameter in self._checks.parameters.items():
            if id(parameter) in added:
                self.compression.add(name, _float32(parameter))
        self.compression.agree()

    def to_sgd(self, **options: Any) -> torch.optim.SGD:
        """Return torch's SGD with the same groups and momenta; this optimizer remains as it is.

        The model's gradients still are those of each rank: wrap the module in a new
        DistributedDataParallel to train with the result.

        Args:
            options: other options of `torch.optim.SGD`, such as ``fused=True``.
        """
        sgd = torch.optim.SGD(settings_only(self), **options)
        for parameter, state in self.state.items():
            sgd.state[parameter] = {"momentum_buffer": state["momentum_buffer"].clone()}
        return sgd

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take copies of the momenta of torch's SGD for the same parameters."""
        for parameter, state in optimizer.state.items():
            buffer = state.get("momentum_buffer")
            if buffer is not None:
                self.state[parameter] = {"momentum_buffer": buffer.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of ranks."""
        load(self, state_dict, ("coding_error",))
        self._codecs.clear()  # the error in the state belongs to the codec that comes

    # ------------------------------------------------------------------ a step

    @_disable_dynamo  # a step exchanges values, which no graph has
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step by the gradients of all ranks, which all of them take together.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Raises:
            Error: a GradScaler scaled the gradients, and the optimizer was made without it.
            ValueError: a group has a setting or a parameter now with which it cannot be made.
        """
        self._checks.check(self.param_groups)
        self.compression.follow_members()  # raises if they have changed
        ready, loss = prepare(self, self._scaler, closure, self._overflows)
        if not ready:
            return loss
        parts = [
            Part(self._checks.names[id(parameter)], parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if id(parameter) in self._used
        ]
        if is_filling(self) and not self.compression.on_any_rank(has_gradient(self)):
            for part in parts:  # as a template for a checkpoint
                self._start(part)
        elif parts:
            self._take(parts)
        return loss

    def _overflows(self, found: bool) -> bool:
        """Return whether any rank's gradients overflow, and tell the scaler; collective.

        It also finds which parameters have a gradient on any rank: these take part in the step.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        own = [found, *(p.grad is not None for p in parameters)]
        if self.process_group.size() > 1:
            device = device_of(self.process_group)
            flags = torch.tensor(own, device="cpu", dtype=torch.uint8).to(device)
            work = dist.all_reduce(
                flags, dist.ReduceOp.MAX, group=self.process_group, async_op=True
            )
            own = answer(work, flags).bool().tolist()
        overflow, *used = own
        self._used = {id(p) for p, one in zip(parameters, used, strict=True) if one}
        if overflow and self._scaler is not None:  # it lowers its scale by what it knows
            for each in self._scaler._found_inf_per_device(self).values():
                each.fill_(1.0)
            self.found_inf = torch.ones(
                (), dtype=torch.float32, device="cpu"
            )  # until the scaler's step ends
        return overflow

    def _take(self, parts: list[Part]) -> None:
        own = self.momenta.own
        for part in parts:
            self._start(part)
        exact = {part.name for part in parts if self._codecs[part.name] == EXACT}
        momenta = {
            part.name: part.gradient if part.name in exact else self._momentum(part, own)
            for part in parts
        }
        means = self._exchange(momenta)
        if means is None:
            return
        alone = not self.momenta.codes_sums(momenta, parts[0].parameter.device)
        errors = []
        for part in parts:
            keeps = float(part.group["momentum"]) > 0  # else the buffer waits, as torch's does
            if part.name in exact:
                self._step_exact(part, means[part.name].view_as(part.parameter))
                continue
            if alone:
                sent, error = self._sent(part.name, momenta[part.name])
                errors.append(error)
                if keeps:
                    own[part.name] = sent
            elif keeps:
                own.pop(part.name, None)
            mean = means[part.name].view_as(part.parameter)
            if keeps:
                mean = self.state[part.parameter]["momentum_buffer"].copy_(mean)
            part.parameter.add_(mean, alpha=-float(part.group["lr"]))
        if errors:
            self._measure([part for part in parts if part.name not in exact], errors)

    def _step_exact(self, part: Part, gradient: torch.Tensor) -> None:
        """Move a parameter by the mean gradient, in the order of operations of torch's SGD."""
        self.momenta.own.pop(part.name, None)  # a codec that comes goes on from the mean
        group, buffer = part.group, self.state[part.parameter]["momentum_buffer"]
        if group["weight_decay"]:
            gradient = gradient.add(part.parameter, alpha=float(group["weight_decay"]))
        if float(group["momentum"]) > 0:
            gradient = buffer.mul_(float(group["momentum"])).add_(gradient)
        part.parameter.add_(gradient, alpha=-float(group["lr"]))

    def _exchange(self, momenta: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Average momenta over the ranks, coded; collective.

        Args:
            momenta: float32 [shape] by parameter name.

        Returns:
            The averages, flat; None: they are not finite, on any rank, and nothing has changed.
        """
        state, overflows = self.compression, self.compression.overflows
        flat = torch.cat([value.reshape(-1) for value in momenta.values()])
        state.begin_step()
        flat = state.wait(self.momenta.reduce(flat, list(momenta)))
        state.end_step()
        state.settle()
        if state.overflows > overflows:
            return None
        sizes = [value.numel() for value in momenta.values()]
        return dict(zip(momenta, torch.split(flat, sizes), strict=True))

    def _start(self, part: Part) -> None:
        """Begin a parameter's state if it is empty, and with another codec its error."""
        state: dict[str, Any] = self.state[part.parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(part.parameter)
        codec = self.compression.decisions[part.name].codec
        if self.process_group.size() == 1:
            codec = EXACT  # one rank codes nothing
        if "coding_error" not in state:
            state["coding_error"] = torch.zeros((), dtype=torch.float32, device="cpu")
            self._codecs.pop(part.name, None)
        if self._codecs.get(part.name) != codec:  # the error of another one is not known yet
            if part.name in self._codecs or not state["coding_error"]:
                state["coding_error"].fill_(0.0 if codec == EXACT else nominal_error(codec) ** 2)
            self._codecs[part.name] = codec

    def _momentum(self, part: Part, own: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return b o + (1 - b) / (1 - momentum) (g + wd x), float32 [shape]."""
        state, momentum = self.state[part.parameter], float(part.group["momentum"])
        before = own.get(part.name)
        if before is None:  # it goes on from what all have agreed on
            before = state["momentum_buffer"].float()
        gradient = part.gradient
        if part.group["weight_decay"]:
            gradient = gradient.add(part.parameter, alpha=float(part.group["weight_decay"]))
        beta = shortened(momentum, float(state["coding_error"]))
        return (before * beta).add_(gradient, alpha=(1 - beta) / (1 - momentum))

    def _residual(self, name: str) -> Residual | None:
        residuals = self.compression.residuals
        if residuals is None or name not in residuals:
            return None
        residual = residuals[name]
        return residual if residual.worker is not None else None

    def _sent(self, name: str, momentum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what this rank has sent [shape], and the squares of its error and of p [2]."""
        squares = torch.zeros(2, device=momentum.device, dtype=torch.float32)
        residual = self._residual(name) if self.process_group.size() > 1 else None
        if residual is None:
            return momentum, squares
        # The step is committed: what it has written is current, and the other side is still there.
        after, before = residual.load_worker(), self.momenta.before.pop(name, None)
        coded = momentum.reshape(-1) + (residual.written_worker() if before is None else before)
        squares[0], squares[1] = after.dot(after), coded.dot(coded)
        return coded.sub_(after).view_as(momentum), squares

    def _measure(self, parts: list[Part], squares: list[torch.Tensor]) -> None:
        """Let the ranks agree, every few steps, on what their codings leave to the next step."""
        if self.compression.step % MEASURED_EVERY != 1:
            return
        sums = torch.stack(squares)
        dist.all_reduce(sums, group=self.process_group)
        for part, (left, coded) in zip(parts, sums.tolist(), strict=True):
            if left > 0 and math.isfinite(coded):
                error = self.state[part.parameter]["coding_error"]
                error.mul_(0.75).add_(0.25 * min(1.0, left / coded))


def _float32(parameter: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor of a parameter's shape that takes no memory."""
    one = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return one.expand(parameter.shape)


def _refusal(model: nn.Module) -> str:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return (
            "CodedSGD takes a model in DistributedDataParallel: each rank needs the gradients of "
            "whole parameters. For fully_shard use pycomm.CodedAdamW"
        )
    return f"CodedSGD takes a model wrapped in DistributedDataParallel, not {type(model).__name__}"
