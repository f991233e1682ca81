"""DDP's hook for optimizers whose momentum travels instead of the gradients.

For a coded parameter, a bucket that DDP has filled with gradients leaves the hook with the momentum
that all ranks have agreed on. `pycomm.optim` steps with it. docs/optimizers.md has the algorithm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.errors import Error
from pycomm.feedback.rule import EXACT
from pycomm.hooks.ddp import HookState
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.moment import CodedMoment
from pycomm.reduction.reducer import _done
from pycomm.reduction.single_coding import SingleCoding, is_coarse


class MomentumState(HookState):
    """Codecs and residuals of a DDP model whose coded parameters exchange momentum.

    Args:
        codec: codec or policy of the momentum.
        model: the DDP model.
        find: function from a parameter to its optimizer's settings and state; None: the optimizer
            does not have it.
        unit: function that returns the loss scale.
        refresh: second moments are exchanged every so many steps; 0: so that they are at most an
            eighth of the bytes.
        options: feedback and seed; see `CompressionState`.
    """

    def __init__(
        self,
        codec: str | Codec | Policy,
        model: DistributedDataParallel,
        *,
        find: Callable[[torch.Tensor], tuple[dict[str, Any], dict[str, Any]] | None],
        unit: Callable[[], float],
        refresh: int = 0,
        **options: Any,
    ) -> None:
        self._find = find
        super().__init__(codec, model, **options)
        self._unit, self._scale = unit, 1.0
        self._refresh = refresh
        self._sent: dist.Work | _Complete | None = None  # the exchange of second moments
        self.stays_because = (
            "CodedAdamW keeps second moments that members share: wrap the module in a new "
            "DistributedDataParallel, make a new CodedAdamW and call its adopt_state on all ranks"
        )
        self._sums: torch.Tensor | None = None
        self._pending = False  # a reduction that no optimizer step has used
        self._handles: list[Any] = []
        self.moments: dict[str, CodedMoment] = {}
        """The coded parameters, by name."""
        self.steps = 0
        """Optimizer steps so far."""
        for name in self.decisions:
            self._make_moment(name)
        sums = sum(moment.sums_numel for moment in self.moments.values())
        payload = sum(self.decisions[name].encoded_bytes for name in self.moments)
        if not refresh:
            self._refresh = min(16, max(1, -(-8 * 4 * sums // max(1, payload))))

    def _enter(self, name: str, parameter: torch.Tensor) -> None:
        if self._find(parameter) is None:
            self.add(clean(name), parameter, exact="another optimizer has it")
            return
        super()._enter(name, parameter)
        if hasattr(self, "moments"):  # else the constructor makes them; this one was frozen
            self._make_moment(clean(name))

    def _make_moment(self, name: str) -> None:
        """Code the momentum of a parameter, unless it has one dimension or is always exact."""
        decision, parameter = self.decisions[name], self._by_name[name]
        rule = self.plan.policy.rule(decision.parameter)
        exact = rule is not None and parse_codec(rule.codec) == EXACT
        found = self._find(parameter)
        if found is None or exact or parameter.ndim < 2 or not parameter.numel():
            return
        if all(codec == EXACT for codec in self.plan.policy.named()):
            return
        settings, kept = found
        self.moments[name] = CodedMoment(parameter, settings, kept, decision.codec)
        look = _Look(weakref.ref(self), name)
        handle = parameter.register_hook(look)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    # ------------------------------------------------------------------ for the optimizer

    def take_sums(self) -> None:
        """Complete the exchange of second moments, before an optimizer's step; on all ranks."""
        received = None
        if self._sent is not None:
            self._sent.wait()
            assert self._sums is not None
            received = self._sums.div_(self.process_group.size())
            self._sent = self._sums = None
        at = 0
        for name, moment in self.moments.items():
            part = None
            if received is not None:
                part = received[at : at + moment.sums_numel]
                at += moment.sums_numel
            moment.commit(part, used=name in self._touched_moments)
        self._pending = False
        self.steps += 1

    @property
    def _touched_moments(self) -> set[str]:
        """The coded parameters that have a momentum to use."""
        return {n for n, moment in self.moments.items() if moment.parameter.grad is not None}

    # ------------------------------------------------------------------ steps

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """See `HookState`."""
        if self.moments and torch._C._current_graph_task_id() == -1:
            raise Error(
                f"rank {self.process_group.rank()}: Join shadows this rank, which has no more data "
                "and takes no more steps, so its momentum is not that of the others: give all "
                "ranks equally many batches, or use pycomm.compress"
            )
        return super().reduce_bucket(bucket)

    def begin_step(self, *, weigh: bool = True, absent: bool = False) -> None:
        """See `CompressionState`: a step also begins after gradients that were thrown away."""
        if self._pending:
            for name in self.moments:
                self.look(name)
            self._thrown.update(n for n, moment in self.moments.items() if moment.base is None)
            if self._sent is not None:
                self._sent.wait()  # its numbers belong to gradients that were not used
                self._sent = self._sums = None
        super().begin_step(weigh=weigh, absent=absent)
        self._scale = self._unit()
        for moment in self.moments.values():
            moment.begin(again=self._pending and moment.base is not None)

    def look(self, name: str) -> None:
        """Keep what is in a gradient that no step has used, before a backward adds to it."""
        moment = self.moments[name]
        if not self._pending or moment.looked:
            return
        moment.looked = True
        gradient = moment.parameter.grad
        if gradient is not None and gradient.any():
            moment.base = gradient.detach().clone()

    def end_step(self) -> None:
        """See `CompressionState`: the second moments travel behind the last bucket."""
        super().end_step()
        self._pending = True
        moments = self.moments.values()
        if not moments or not (self.steps < self._refresh or self.steps % self._refresh == 0):
            return
        sums = torch.cat([moment.local_sums() for moment in moments])
        if self.process_group.size() > 1:
            self._sent = dist.all_reduce(sums, group=self.process_group, async_op=True)
        else:
            self._sent = _Complete()
        self._sums = sums

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket: gradients of exact parameters, and the momentum of the others."""
        found = [(name, self.moments[name]) for name in names if name in self.moments]
        if not found:
            return super().reduce(tensor, names)
        bucket = self._bucket(tuple(names), tensor.device)
        places = {piece.name: piece for piece in bucket.pieces}
        parts = [
            (moment, tensor[places[n].offset : places[n].offset + places[n].numel], places[n])
            for n, moment in found
        ]
        for moment, part, piece in parts:
            if self.process_group.size() > 1:
                moment.use(piece.codec)
            moment.enter(part, self._scale)
        self._share_scales([moment for moment, _, _ in parts if not moment.has_scale])
        for moment, part, piece in parts:
            moment.encode(part, self._scale, piece.residual)
        future = super().reduce(tensor, names)

        def restore(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            result = done.value()
            for moment, part, _ in parts:
                moment.decode(part, self._scale)
            return result

        return future.then(restore)

    def _share_scales(self, moments: Sequence[CodedMoment]) -> None:
        """Exchange the second moments of parameters that have none yet, before they are coded."""
        if not moments:
            return
        sums = torch.cat([moment.local_sums() for moment in moments])
        if self.process_group.size() > 1:
            dist.all_reduce(sums, group=self.process_group)
            sums.div_(self.process_group.size())
        parts = torch.split(sums, [moment.sums_numel for moment in moments])
        for moment, part in zip(moments, parts, strict=True):
            moment.provide(part)

    def _reduce_coded(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        if self.process_group.size() == 1 or not any(is_coarse(p.codec) for p in bucket.pieces):
            return super()._reduce_coded(tensor, bucket)
        if bucket.single is None:
            bucket.single = SingleCoding(bucket, self.process_group)
        single: SingleCoding = bucket.single
        dense = [p for p in bucket.pieces if p.codec.combine != "gather"]
        if single.gathers and not any(is_coarse(p.codec) for p in dense):
            return super()._reduce_coded(tensor, bucket)  # payloads are gathered there, too
        self._use(bucket.pieces, bucket, tensor)
        values = tensor.contiguous()
        finite = single.average(values, bucket, seed=self.seed, step=self.step)
        self._finite.append(lambda: bool(finite))
        if values is not tensor:
            tensor.copy_(values)
        return _done(tensor)


class _Complete:
    """The work of a group of one rank."""

    def wait(self) -> bool:
        return True


class _Look:
    """A parameter's hook, which keeps what is in its gradient before a second backward adds to it.

    The reference is weak, since parameters outlive a state.
    """

    __torch_unserializable__ = True  # torch.save of the parameter leaves the hook out silently

    def __init__(self, state: weakref.ref[MomentumState], name: str) -> None:
        self._state, self._name = state, name

    def __call__(self, _: torch.Tensor) -> None:
        state = self._state()
        if state is not None:
            state.look(self._name)
