"""SGD for data-parallel models whose momentum travels coded; docs/optimizers.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.sgd import sgd

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.compression import check_takes_hook
from pycomm.feedback import Feedback, Residual
from pycomm.feedback.rule import EXACT
from pycomm.hooks.ddp import compress_hook
from pycomm.hooks.sent_momentum import SentMomenta
from pycomm.momentum import plain
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
"""Steps from one measurement of the codings' errors to the next, the first of which is that of the
first step's; two numbers of each parameter."""
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
        """This rank's own gradient [shape]; zero if only other ranks have one."""
        return (
            torch.zeros_like(self.parameter) if self.parameter.grad is None else self.parameter.grad
        )


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
        self._exact: set[str] = set()  # the parameters whose codec that is
        self._values: torch.Tensor | None = None  # memory for what travels
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
        for part in parts:
            self._start(part)
        coded = [part for part in parts if part.name not in self._exact]
        names = [part.name for part in parts]
        bucket = self.compression.reducer.bucket_of(tuple(names), parts[0].parameter.device)
        # Else nodes code the sums of their ranks, of which none has sent anything of its own.
        alone = self.process_group.size() == 1 or not bucket.levels
        copies = alone and self.compression.reducer.coding_of(bucket) is None
        # In a step that begins: what the coding before has left is in it, and can be measured.
        measures = alone and self.momenta.steps % MEASURED_EVERY == 1
        values = self._room_for(parts)
        places = torch.split(values, [part.parameter.numel() for part in parts])
        place_of = dict(zip(names, places, strict=True))
        sums = torch.zeros(len(coded), 3, dtype=torch.float32, device=values.device)
        errors = dict(zip((part.name for part in coded), sums, strict=False)) if measures else {}
        plain.encode(
            [
                self._encoding(part, place_of[part.name], errors.get(part.name), copies=copies)
                for part in parts
            ]
        )
        kept = [part for part in coded if part.group["momentum"] > 0]  # else it waits, as torch's
        store = None
        if alone:
            rooms = [self.momenta.room(part.name, part.parameter) for part in kept]
            coded_at = rooms if copies else [place_of[part.name] for part in kept]
            store = partial(self._store_sent, kept, coded_at, rooms)
        if not self._exchange(values, names, store):
            return
        self.momenta.steps += 1
        for part in kept:
            self.momenta.keep(part.name) if alone else self.momenta.own.pop(part.name, None)
        self._move(coded, place_of)
        self._step_exact([part for part in parts if part.name in self._exact], place_of)
        if coded and measures:
            self._measure(coded, sums[:, :2])

    def _room_for(self, parts: list[Part]) -> torch.Tensor:
        """Return memory for the values of parts: on the CPU the same in every step, since pages of
        new memory cost time, and on a device free between steps."""
        numel, device = sum(part.parameter.numel() for part in parts), parts[0].parameter.device
        if self._values is not None and self._values.numel() == numel:
            return self._values
        values = torch.empty(numel, dtype=torch.float32, device=device)
        self._values = values if values.is_cpu else None
        return values

    def _encoding(
        self, part: Part, place: torch.Tensor, errors: torch.Tensor | None, *, copies: bool
    ) -> plain.Encoding:
        """Return what makes that which travels: the momentum, or g where that is exact."""
        shape = plain.rows_and_columns(part.parameter)
        made = plain.Encoding(place.view(shape), _known(part.gradient))
        if part.name in self._exact:
            return made
        state, momentum = self.state[part.parameter], float(part.group["momentum"])
        made.beta = shortened(momentum, float(state["coding_error"]))
        made.unit = 1 / (1 - momentum)
        if made.beta > 0:  # from what this rank has sent, or what all have agreed on
            made.momentum = _known(self.momenta.own.get(part.name, state["momentum_buffer"]))
        if decay := float(part.group["weight_decay"]):
            made.parameter, made.decay = _known(part.parameter.detach()), decay
        if copies and momentum > 0:
            made.copy = self.momenta.room(part.name, part.parameter)
        if errors is not None and (residual := self._residual(part.name)) is not None:
            made.residual, made.errors = residual.stored_worker(), errors
        return made

    def _store_sent(
        self, parts: list[Part], coded: list[torch.Tensor], rooms: list[torch.Tensor]
    ) -> None:
        """Store what this rank sends: what is coded without what its coding leaves.

        Args:
            parts: coded parameters with a momentum.
            coded: what is coded of each, before it is averaged.
            rooms: where it is stored; may be the same.
        """
        stored = []
        for part, values, room in zip(parts, coded, rooms, strict=True):
            residual = self._residual(part.name)
            before = after = None
            if residual is not None:
                before = self.momenta.before.get(part.name)
                before = residual.stored_worker() if before is None else before
                after = residual.fresh_worker()
            matrix = values.view(plain.rows_and_columns(part.parameter))
            stored.append(plain.Sent(matrix, before, after, room.view(-1)))
        if stored:
            plain.store_sent(stored)

    def _move(self, parts: list[Part], means: Mapping[str, torch.Tensor]) -> None:
        """Move coded parameters by the ranks' mean momenta, and keep these."""
        moves, strided = [], []
        for part in parts:
            values = parameter = part.parameter.detach()
            momentum = buffer = self.state[part.parameter]["momentum_buffer"]
            if not (parameter.is_contiguous() and buffer.is_contiguous()):
                values, momentum = parameter.contiguous(), buffer.contiguous()
                strided += [(parameter, values), (buffer, momentum)]
            keeps = float(part.group["momentum"]) > 0
            mean, lr = means[part.name].view(values.shape), float(part.group["lr"])
            if values.dtype == torch.float64:
                values.sub_(mean * lr)
                if keeps:
                    momentum.copy_(mean)
            else:
                moves.append(plain.Move(values, mean, momentum if keeps else None, lr))
        if moves:
            plain.move(moves)
        for to, values in strided:
            if to is not values:
                to.copy_(values)

    def _step_exact(self, parts: list[Part], means: Mapping[str, torch.Tensor]) -> None:
        """Move parameters by their mean gradients, as torch's SGD does, to the bit."""
        alike: dict[tuple[int, torch.dtype], list[Part]] = {}
        for part in parts:
            self.momenta.own.pop(part.name, None)  # a codec that comes goes on from the mean
            alike.setdefault((id(part.group), part.parameter.dtype), []).append(part)
        for (_, dtype), each in alike.items():
            group = each[0].group
            sgd(
                [part.parameter for part in each],
                [means[part.name].view_as(part.parameter) for part in each],
                [self.state[part.parameter]["momentum_buffer"] for part in each],
                # None: the default of torch, which is not made for two dtypes.
                foreach=None if dtype == torch.float32 else False,
                lr=float(group["lr"]),
                momentum=float(group["momentum"]),
                weight_decay=float(group["weight_decay"]),
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    def _exchange(
        self, values: torch.Tensor, names: list[str], store: Callable[[], None] | None
    ) -> bool:
        """Average what travels over the ranks, coded, in place; collective.

        Args:
            values: float32, of all parameters one behind the other.
            names: of these parameters.
            store: stores what this rank sends, before residuals change sides; None: nothing.
                Where one may, it is called when values are coded and not yet averaged.

        Returns:
            False: the averages are not finite, on any rank, and nothing has changed.
        """
        state, overflows = self.compression, self.compression.overflows
        state.begin_step()
        bucket = state.reducer.bucket_of(tuple(names), values.device)
        early = state.reducer.coding_of(bucket) is not None
        state.reducer.encoded = store if early else None
        state.wait(self.momenta.reduce(values, names))
        if store is not None and not early:
            store()
        state.end_step()
        state.settle()
        return state.overflows == overflows

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
        before = self._codecs.get(part.name)
        if before is codec:
            return
        if before != codec:  # the error of another one is not known yet
            if before is not None or not state["coding_error"]:
                state["coding_error"].fill_(0.0 if codec == EXACT else nominal_error(codec) ** 2)
            (self._exact.add if codec == EXACT else self._exact.discard)(part.name)
        self._codecs[part.name] = codec

    def _residual(self, name: str) -> Residual | None:
        residuals = self.compression.residuals
        if residuals is None or name not in residuals:
            return None
        residual = residuals[name]
        return residual if residual.worker is not None else None

    def _measure(self, parts: list[Part], squares: torch.Tensor) -> None:
        """Let the ranks agree, every few steps, on what their codings leave to the next step.

        Args:
            parts: the coded parameters.
            squares: of each the sums of the squares of e and of p, on this rank [parts, 2].
        """
        sums = squares.contiguous()
        dist.all_reduce(sums, group=self.process_group)
        for part, (left, coded) in zip(parts, sums.tolist(), strict=True):
            if left > 0 and math.isfinite(coded):
                error = self.state[part.parameter]["coding_error"]
                error.mul_(0.75).add_(0.25 * min(1.0, left / coded))


def _known(values: torch.Tensor) -> torch.Tensor:
    """Return values as `plain.encode` takes them: without gaps, of 16 or 32 bits."""
    return (values.float() if values.dtype == torch.float64 else values).contiguous()


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
