"""Momenta: the transform of an optimizer whose momentum travels in place of the gradients.

For a coded parameter, a bucket that was filled with gradients leaves the hook with the momentum
that all ranks have agreed on. `pycomm.optim` steps with it. docs/optimizers.md has the algorithm.

Each rank goes on from what itself has sent, o, whose mean over the ranks is the momentum:

    p = (b o + (1 - b) g) / d + e;  q = C(p);  e <- p - q;  o <- d q;  m <- d mean(q)

In a reduce-scatter it knows nothing else. If nodes code sums of their ranks, a rank has sent
nothing of its own, and goes on from m, as it does where it has no o.

Between replicas (DDP, HSDP, `replicate`) the momentum is averaged, or shards of it are. In a
reduce-scatter each rank gets its own shard of the momentum, and knows that of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.codecs import Codec, short_text
from pycomm.codecs import codec as parse_codec
from pycomm.errors import Error
from pycomm.feedback import Residuals
from pycomm.feedback.rule import EXACT
from pycomm.momentum.moment import CodedMoment, local
from pycomm.momentum.passes import Job, Kernels, Passes, Table
from pycomm.policy import AUTO, CODED, Policy
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.reducer import BucketReducer
from pycomm.reduction.refusals import MOMENTA, UNBIASED, refused, stays_because
from pycomm.reduction.state import CompressionState
from pycomm.reduction.taken import GradientHook

OTHERS = "another optimizer has it"
"""Why a parameter travels exactly that the optimizer does not have."""

Find = Callable[[torch.Tensor], "tuple[dict[str, Any], dict[str, Any]] | None"]
Future = torch.futures.Future[torch.Tensor]


class Momenta:
    """The momenta of a state's parameters, whatever wraps the model.

    It is the `transform` of one state, whose constructor calls `bind`. The state calls the other
    methods at the places that they name.

    Args:
        kind: what is kept of a parameter.
        find: function from a parameter to its optimizer's settings and state; None: the optimizer
            does not have it.
        unit: function that returns the loss scale.
        refresh: second moments are exchanged every so many steps; 0: so that they are at most an
            eighth of the bytes.
    """

    state: CompressionState
    reducer: BucketReducer
    own: Residuals
    """What this rank has sent of the momentum, also for the shards of other ranks."""

    def __init__(
        self, kind: type[CodedMoment], find: Find, unit: Callable[[], float], refresh: int
    ) -> None:
        self._kind, self._find, self._unit, self._scale = kind, find, unit, 0.0  # 0: not known
        self.steps = 0
        """Optimizer steps so far."""
        self.moments: dict[str, CodedMoment] = {}
        """The coded parameters, by name."""
        self._begun = False
        self._sent: dist.Work | None = None  # the exchange of second moments, of several ranks
        self._sums: torch.Tensor | None = None
        self._pending = False  # a reduction that no optimizer step has used
        self._stale = False  # a state was loaded since the last backward
        self._added = False  # the optimizer has got parameters since the last step began
        self._passes: Passes
        """The passes over all moments, from `begin` on."""
        self._job: Job | None = None  # of the bucket that is reduced, on a device
        self._spare: list[torch.Tensor] = []
        # Of a device, whose memory another stream may read until backward's has waited for it.
        self._held: list[Job] = []
        self._codecs_then: list[Codec] = []
        self._handles: dict[str, Any] = {}  # of the coded parameters that get gradients, in DDP
        # Whether those that this backward has reached had a gradient then which no step has used.
        self._filled: dict[str, bool] = {}
        self._refresh_asked, self._refresh = refresh, refresh or 1

    @staticmethod
    def policy_of(codec: str | Codec | Policy) -> Policy:
        """Return the policy of a momentum.

        Raises:
            ValueError: it is "auto", or names an unbiased codec.
        """
        policy = Policy.of(codec)
        if policy.codec == AUTO:
            raise ValueError(refused(MOMENTA, "`auto`"))
        for named in policy.named():
            if named.unbiased:
                remedy = "scale=mmse" if named.name == "eden" else "another codec"
                raise ValueError(refused(MOMENTA, UNBIASED, codec=short_text(named), remedy=remedy))
        # The guard compares results with mean gradients, and here they are momentum.
        return replace(policy, guard=None)

    def bind(self, state: CompressionState) -> None:
        """Belong to a state, which has no parameters yet."""
        self.state, self.reducer = state, state.reducer
        assert state.residuals is not None
        self.own = Residuals(state.residuals.rule, state.process_group.size(), owners=False)
        state.stays_because = stays_because(MOMENTA)

    def begin(self) -> None:
        """Begin with the parameters that the state has got so far."""
        self._passes = Passes(Kernels.find(self.reducer.device), self.moments)
        for name in self.state.decisions:
            self._make_moment(name)
        self._begun = True
        self._set_refresh()

    def exact(self, parameter: torch.Tensor) -> str:
        """Return why a parameter travels exactly whatever the policy says; "": it need not."""
        return OTHERS if self._find(parameter) is None else ""

    def entered(self, name: str) -> None:
        """The state has got a parameter: code the momentum of one that was frozen before."""
        if self._begun:
            made = self._make_moment(name)
            if made is not None:
                made.begin()

    def _set_refresh(self) -> None:
        """Choose how often second moments travel, by the payloads of the codecs of now."""
        codecs = [self.state.decisions[name].codec for name in self.moments]
        if self._refresh_asked or codecs == self._codecs_then:
            return
        self._codecs_then = codecs
        sums = sum(moment.sums_numel for moment in self.moments.values())
        payload = sum(self.state.decisions[name].encoded_bytes for name in self.moments)
        self._refresh = min(16, max(1, -(-8 * 4 * sums // max(1, payload))))

    def _make_moment(self, name: str) -> CodedMoment | None:
        """Code the momentum of a parameter, unless it has one dimension or is always exact."""
        decision, parameter = self.state.decisions[name], self.reducer.by_name[name]
        rule = self.state.plan.policy.rule(decision.parameter)
        exact = rule is not None and parse_codec(rule.codec) == EXACT
        found = self._find(parameter)
        if found is None or exact or parameter.ndim < 2 or not parameter.numel():
            return None
        if parameter.dtype not in CODED:
            return None
        if all(codec == EXACT for codec in self.state.plan.policy.named()):
            return None
        settings, kept = found
        group = self.reducer.layout.shard_group
        shard, shards = (0, 1) if group is None else (group.rank(), group.size())
        form = parameter, settings, kept, decision.codec
        made = self._kind(*form, shard=shard, shards=shards)
        self.factor(made, kept)
        self.moments[name] = made
        self._watch(name, parameter)
        return made

    def _watch(self, name: str, parameter: torch.Tensor) -> None:
        """Look at a gradient before a backward adds to it, unless the parameter is frozen."""
        if self.state.adapter.early or name in self._handles or not parameter.requires_grad:
            return
        handle = parameter.register_hook(GradientHook(self, name))  # type: ignore[no-untyped-call]
        self._handles[name] = handle

    def factor(self, moment: CodedMoment, state: dict[str, Any]) -> None:
        """Make a state of torch's optimizer, which has no sums, that of a coded moment.

        The optimizer has such a state after it stepped a parameter that travelled exactly.
        """
        if state and "row" not in state:
            factored = moment.from_torch(state, self.whole_sums)
            state.clear()
            state.update(factored)

    # ------------------------------------------------------------------ for the optimizer

    def whole_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the total over the shards of sums that ranks have for their own rows; on all."""
        if self.reducer.layout.shard_group is not None:
            dist.all_reduce(sums, group=self.reducer.layout.shard_group)
        return sums

    def check_reduced(self, name: str, parameter: torch.Tensor) -> None:
        """Check that a parameter's gradient has been averaged: FSDP2 averages all.

        Raises:
            Error: DDP's buckets never have it.
        """
        if self.state.adapter.early or id(parameter) in self.reducer.names:
            return
        if name not in self.state.adapter.ignored:
            raise Error(
                f"rank {self.state.process_group.rank()}: {name} was frozen when the model was "
                "wrapped, so DDP does not average its gradient, and ranks would differ: wrap the "
                "module in a new DistributedDataParallel, and make the optimizer anew"
            )

    def check_exact(self, names: Sequence[str], why: str) -> None:
        """Check that the gradients of a unit in FSDP2 can travel exactly in this step.

        Raises:
            Error: one is coded, whose gradient is to be the momentum.
        """
        if not self.moments.keys().isdisjoint(names):
            raise Error(
                f"rank {self.state.process_group.rank()}: the momentum of {names[0]} and the rest "
                f"of its unit cannot travel coded in this step: {why}. "
                "set_reduce_scatter_unused_params(True) on the module makes missing gradients zero"
            )

    def take_added(self) -> None:
        """Code the parameters that the optimizer has got since.

        While a momentum waits for the optimizer's step, they follow when the next step begins.
        """
        self._added = self._pending
        if self._added:
            return
        for name, parameter in list(self.reducer.by_name.items()):
            travels_exactly = self.state.decisions[name].parameter.exact == OTHERS
            if travels_exactly and self._find(parameter) is not None:
                self.state.add(name, parameter)

    def drop_step(self) -> None:
        """Drop what a backward has left that no optimizer step has used: a state is loaded."""
        if self._pending:
            self.reducer.step.discarded.update(self.moments)
            self._stale = True
        self._drop_sums()
        self._pending = False
        self.state.settle()
        if self._added:
            self.take_added()

    def take_sums(self) -> None:
        """Complete the exchange of second moments, before an optimizer's step; on all ranks.

        Also keeps what was sent for the momentum that is used now.

        Raises:
            Error: the momentum was made before a state was loaded.
        """
        if self._stale and self._touched_moments:
            raise Error(
                f"rank {self.state.process_group.rank()}: a state was loaded after the last "
                "backward, whose momentum would take the place of the loaded one: call "
                "zero_grad() after loading"
            )
        if self._pending:
            self.own.commit(self._touched_moments, self.state.step)
        # A second wait for an exchange that has failed would tell less of the failure.
        sent, self._sent = self._sent, None
        if sent is not None:
            with self._beside():
                sent.wait()
        if self.reducer.side is not None:  # behind what was queued there
            torch.accelerator.current_stream().wait_stream(self.reducer.side.stream)
        if self.moments:
            sums = None if self._sums is None else self._total(self._sums)
            self._passes.commit(sums, self.state.process_group.size(), self.reducer.step.unused)
        self._sums, self._pending = None, False
        self.steps += 1

    def move(self, moments: Sequence[CodedMoment], lr: float, weight_decay: float) -> None:
        """Move parameters of one group by their momenta, which are their gradients."""
        if moments:
            self._passes.move(moments, lr, weight_decay)

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of whole parameters from those that replicas have added up."""
        # In a reduce-scatter each rank has a gradient of all rows, so it has the sums of all.
        return sums if self.reducer.layout.rows > 1 else self.whole_sums(sums)

    @property
    def _unused(self) -> bool:
        """Whether gradients may hold momentum that no step has used."""
        return self._pending or self._stale

    @property
    def _touched_moments(self) -> set[str]:
        """The coded parameters that have a momentum to use."""
        there = {n for n, moment in self.moments.items() if moment.parameter.grad is not None}
        return there - self.reducer.step.unused

    # ------------------------------------------------------------------ steps

    def before_step(self, *, joined: bool) -> None:
        """A step is to begin, maybe after gradients that were thrown away; nothing has changed.

        Raises:
            Error: this rank has no data in it; or gradients still hold momentum.
        """
        if joined and self.moments:
            raise Error(f"rank {self.state.process_group.rank()}: {refused(MOMENTA, '`Join`')}")
        if self._unused and self._has_momentum():
            why = refused(MOMENTA, "two synchronized backwards before a step")
            raise Error(f"rank {self.state.process_group.rank()}: {why}")
        if self._pending:
            self.reducer.step.discarded.update(self.moments)
            self._drop_sums()

    def _drop_sums(self) -> None:
        """Wait for second moments of gradients that were not used, and forget them."""
        if self._sent is not None:
            self._sent.wait()
        self._sent = self._sums = None

    def step_begun(self) -> None:
        """A step has begun."""
        self._stale, self._job = False, None
        self.reducer.encoded = None  # of a bucket that an error has ended
        self._held.clear()
        self._pending = False  # else the hooks of later buckets would look at no gradient
        if self._added:
            self.take_added()
        self._set_refresh()  # a schedule may have changed the codecs
        scale = self._unit()
        if self._scale not in (0.0, scale):  # residuals of gradients have their unit
            others = [name for name in self.state.decisions if name not in self.moments]
            self.state.rescale(scale / self._scale, others, momentum=True)
        self._scale = scale
        for moment in self.moments.values():
            moment.begin()
        self._passes.refresh()
        self._filled.clear()
        for name, moment in self.moments.items():  # those that were frozen may get gradients now
            self._watch(name, moment.parameter)

    def _has_momentum(self) -> bool:
        """Return whether a gradient holds momentum that no step has used; alike on all ranks."""
        if self.state.adapter.early:
            return self.state.on_any_rank(any(map(_is_filled, self.moments.values())))
        for name in self._handles:  # a frozen one had no gradient
            self.look(name)
        found = any(self._filled.values())
        self._filled.clear()
        return found

    def look(self, name: str) -> None:
        """See whether a gradient holds what no step has used, before a backward adds to it."""
        if self._unused and name not in self._filled:
            self._filled[name] = _is_filled(self.moments[name])

    def step_ended(self) -> None:
        """All buckets of a step were given to `reduce`: second moments travel behind the last."""
        self._pending = True
        if not self.moments or not self._exchanges_sums:
            return
        # Made on backward's stream, on which the step reads it at last.
        sums = self._passes.room_for_sums()
        with self._beside():
            self._passes.collect(sums)
            if self.state.process_group.size() > 1:
                self._sent = dist.all_reduce(sums, group=self.state.process_group, async_op=True)
        self._sums = sums

    def _beside(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued behind the reductions by kernels."""
        if self.reducer.side is None:
            return nullcontext()
        stream = self.reducer.side.stream
        stream.wait_stream(torch.accelerator.current_stream())
        return cast("AbstractContextManager[Any]", stream)

    @property
    def _exchanges_sums(self) -> bool:
        """Whether second moments travel in this step."""
        return self.steps < self._refresh or self.steps % self._refresh == 0

    def reduce(self, tensor: torch.Tensor, names: Sequence[str]) -> Future:
        """Average a bucket: gradients of exact parameters, and the momentum of the others.

        Written with few calls, as `_reduce_coded`.
        """
        names = tuple(names)
        bucket = self.reducer.buckets.get(names) or self.reducer.bucket_of(names, tensor.device)
        ranks = self.state.process_group.size()
        table: Table | None = bucket.moments
        if table is None or not table.is_current:
            table = bucket.moments = self._table_of(bucket)
        if not table.parts:
            return self.reducer.reduce(tensor, names)
        single = table.own is not None and self.reducer.coding_of(bucket) is not None
        copies = table.own is not None and not single
        room = self._room_for if tensor.is_cpu else torch.empty_like
        job = Job(
            *(self._passes, table, tensor),
            unit=self._scale,
            ranks=ranks,
            looks=self._exchanges_sums,
            divides=self._divides(names),
            room=room if copies else None,
        )
        if single:
            self.reducer.encoded = job.sent
        if tensor.is_cpu or not self._encodes_beside(bucket):
            self._encode_now(job, bucket)
        self._job = None if tensor.is_cpu else job
        future = self.reducer.reduce(tensor, names)
        if self._job is None and not tensor.is_cpu:  # `exchange` has finished it
            return future
        self._job = None

        def finish(done: Future) -> torch.Tensor:
            result = done.value()
            if copies:
                job.sent()
                if job.copy is not None and tensor.is_cpu:
                    self._spare.append(job.copy)
            job.land()
            return result

        if ranks == 1 and future.done():
            finish(future)
            return future
        return future.then(finish)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> None:
        """See `BucketReducer.scatter`; this rank gets its shards of the momentum."""
        bucket = self.reducer.bucket_of(tuple(names), input.device)
        table = bucket.moments
        if table is None or not table.is_current:
            table = bucket.moments = self._table_of(bucket)
        if not table.parts:
            self.reducer.scatter(output, input, names, group, average=average)
            return
        if not average:
            why = refused(MOMENTA, "sums of torch")
            raise Error(f"rank {self.state.process_group.rank()}: {why}")
        job = Job(
            *(self._passes, table, input),
            unit=self._scale,
            ranks=self.state.process_group.size(),
            looks=self._exchanges_sums,
            divides=self._kind.divides,
        )
        job.encode(scale=self._scale_on)
        self.reducer.scatter(output, input, names, group, average=average)
        job.sent()
        job.land(output)

    def _divides(self, names: Sequence[str]) -> bool:
        """Return whether a momentum is divided by d: not where it is not coded, on one rank."""
        if not self._kind.divides:
            return False
        return self.state.process_group.size() > 1 or self._scale != 1 or self.reducer.is_fed(names)

    def _table_of(self, bucket: Bucket) -> Table:
        parts = [(self.moments[p.name], p) for p in bucket.pieces if p.name in self.moments]
        own = None
        if self.state.process_group.size() > 1 and not bucket.levels:
            form: dict[str, Any] = {"rows": self.reducer.layout.rows}
            own = [
                self.own.get(p.name, p.numel, self.reducer.device, codec=p.codec, **form)
                for _, p in parts
            ]
        numel = sum(piece.numel for piece in bucket.pieces)
        return Table(self._passes.kernels, parts, own, self.reducer.layout.rows, numel)

    def _encodes_beside(self, bucket: Bucket) -> bool:
        """Return whether `exchange` may encode, as what comes before it has nothing to change."""
        choice = bucket.paths.get(("all_reduce", False))
        if choice is None or choice.path.in_core or self.state.process_group.size() == 1:
            return False  # it is not called, or one cannot know
        if self.state.plan.sampled:
            return False
        for moment, _ in bucket.moments.parts:
            if not moment.knows:
                return False
        for residual in bucket.residuals:
            if residual is not None and (residual.in_place or residual.layouts != bucket.layouts):
                return False
        return True

    def _encode_now(self, job: Job, bucket: Bucket) -> None:
        """Encode on the stream of backward, before the reduction looks at values and residuals."""
        self.reducer.settle_deferred()
        if self.reducer.device.type != "cpu":
            self._held.append(job)
        job.encode(scale=self._scale_on)
        if job.table.own is not None:
            pieces = (piece for piece in bucket.pieces if piece.name in self.moments)
            job.befores = self.reducer.residuals_before(pieces, bucket)

    def _scale_on(self, moments: Sequence[CodedMoment]) -> None:
        def sum_up(sums: torch.Tensor) -> int:
            if self.state.process_group.size() > 1:
                dist.all_reduce(sums, group=self.state.process_group)
            self._total(sums)
            return self.state.process_group.size()

        self._passes.scale(moments, sum_up)

    def exchange(
        self,
        tensor: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        finish: Callable[[torch.Tensor], object] | None = None,
        **options: Any,
    ) -> None:
        """See `BucketReducer`; kernels make the momentum of the gradients before it, and after."""
        job, self._job = self._job, None  # None on the CPU, where another thread may call this
        if job is not None and not job.encoded:
            job.encode(options.get("swapped"))
        self.reducer.exchange(tensor, bucket, group, finish, **options)
        if job is None:
            return
        if job.table.own is not None and not bucket.single:
            job.sent()
        job.land()

    def _room_for(self, values: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy of values, on the CPU, where `_spare` gets it back.

        It is used again: pages of new memory would cost more than the copy.
        """
        for i, spare in enumerate(self._spare):
            if spare.dtype == values.dtype and spare.numel() >= values.numel():
                return self._spare.pop(i)
        self._spare.clear()  # what is too small now
        return torch.empty_like(values)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return entries of the state's `state_dict`: what this rank has sent of the momentum."""
        return {f"own{dist.get_rank()}": (self.state.step, self.own.state_dict())}


def _is_filled(moment: CodedMoment) -> bool:
    gradient = moment.parameter.grad
    return gradient is not None and bool(local(gradient).any())
