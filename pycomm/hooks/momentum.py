"""Momenta: the transform of an optimizer whose momentum travels in place of the gradients.

For a coded parameter, a bucket that was filled with gradients leaves the hook with the momentum
that all ranks have agreed on. `pycomm.optim` steps with it. docs/optimizers.md has the algorithm.

Each rank goes on from what itself has sent, o, whose mean over the ranks is the momentum:

    p = (b o + (1 - b) g) / d + e;  q = C(p);  e <- p - q;  o <- d q;  m <- d mean(q)

In a reduce-scatter it knows nothing else. If nodes code sums of their ranks, a rank has sent
nothing of its own, and goes on from m, as it does where it has no o.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.errors import Error, PeerLost
from pycomm.feedback import Residual, Residuals
from pycomm.feedback.rule import EXACT
from pycomm.momentum import scaled
from pycomm.momentum.moment import CodedMoment
from pycomm.momentum.on_device.job import Job
from pycomm.momentum.on_device.moment import DeviceMoment
from pycomm.momentum.on_device.passes import DevicePasses
from pycomm.momentum.on_device.table import Table
from pycomm.momentum.sum_places import SumPlaces
from pycomm.policy import CODED
from pycomm.reduction.bucket import Bucket, BucketPiece
from pycomm.reduction.reducer import BucketReducer
from pycomm.reduction.saved import known, residuals_of
from pycomm.reduction.state import CompressionState
from pycomm.reduction.transform import Transform

OTHERS = "another optimizer has it"
"""Why a parameter travels exactly that the optimizer does not have."""

Find = Callable[[torch.Tensor], "tuple[dict[str, Any], dict[str, Any]] | None"]


class Momenta(Transform, ABC):
    """The momenta of a state's parameters, whatever wraps the model.

    Args:
        find: function from a parameter to its optimizer's settings and state; None: the optimizer
            does not have it.
        unit: function that returns the loss scale.
        refresh: second moments are exchanged every so many steps; 0: so that they are at most an
            eighth of the bytes.
    """

    state: CompressionState
    reducer: BucketReducer
    kept_alike = 2  # what was sent is kept beside the residuals
    own: Residuals
    """What this rank has sent of the momentum, also for the shards of other ranks."""
    has_whole = False
    """Each rank has whole parameters, which the kernels of a device take."""

    def __init__(self, find: Find, unit: Callable[[], float], refresh: int) -> None:
        self._find, self._unit, self._scale = find, unit, 1.0
        self.steps = 0
        """Optimizer steps so far."""
        self.moments: dict[str, CodedMoment] = {}
        """The coded parameters, by name."""
        self._begun = False
        self._sent: dist.Work | None = None  # the exchange of second moments, of several ranks
        self._sums: torch.Tensor | None = None
        self._sum_places: SumPlaces | None = None
        self._lost: PeerLost | None = None  # the first error of a group that has lost ranks
        self._pending = False  # a reduction that no optimizer step has used
        self._stale = False  # a state was loaded since the last backward
        self._added = False  # the optimizer has got parameters since the last step began
        # Of a device with kernels, which then have the passes over all moments.
        self._passes: DevicePasses | None = None
        self._job: Job | None = None  # of the bucket that is reduced
        self._spare: list[torch.Tensor] = []
        # Of a device, whose memory another stream may read until backward's has waited for it.
        self._held: list[Job] = []
        self._codecs_then: list[Codec] = []
        self._refresh_asked, self._refresh = refresh, refresh or 1

    def bind(self, state: CompressionState) -> None:
        """See `Transform`."""
        super().bind(state)
        assert state.residuals is not None
        self.own = Residuals(state.residuals.rule, state.process_group.size(), owners=False)
        state.stays_because = (
            "CodedAdamW keeps second moments that members share: wrap the module in a new "
            "DistributedDataParallel, make a new CodedAdamW and call its adopt_state on all ranks"
        )

    def begin(self) -> None:
        """Begin with the parameters that the state has got so far."""
        if self.has_whole:
            self._passes = DevicePasses.find(self.reducer.device)
        self.state.defers = self._passes is not None
        for name in self.state.decisions:
            self._make_moment(name)
        self._begun = True
        self._set_refresh()

    def exact(self, parameter: torch.Tensor) -> str:
        """See `Transform`."""
        return OTHERS if self._find(parameter) is None else ""

    def entered(self, name: str) -> None:
        """See `Transform`: code the momentum of a parameter that was frozen before."""
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
        shard, shards = self._shard()
        made = (CodedMoment if self._passes is None else DeviceMoment)(
            *(parameter, settings, kept, decision.codec),
            shard=shard,
            shards=shards,
            ranks=self.state.process_group.size(),
        )
        self.factor(made, kept)
        self.moments[name] = made
        return made

    def factor(self, moment: CodedMoment, state: dict[str, Any]) -> None:
        """Make a state of torch's AdamW, which has full second moments, that of a coded moment.

        The optimizer has such a state after it stepped a parameter that travelled exactly.
        """
        if state and "row" not in state:
            sums = self.whole_sums(moment.squares_of(state))
            factored = moment.factored(state, sums)
            state.clear()
            state.update(factored)

    def _shard(self) -> tuple[int, int]:
        """Return the number of this rank's shard of each parameter, and the number of shards."""
        return 0, 1

    # ------------------------------------------------------------------ for the optimizer

    def whole_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the total over the shards of sums that ranks have for their own rows; on all."""
        return sums

    def check_reduced(self, name: str, parameter: torch.Tensor) -> None:
        """Check that a parameter's gradient has been averaged.

        Raises:
            Error: the wrapper never averages it.
        """

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
        if self._sent is not None:
            self._sent.wait()
        self._sent = self._sums = None
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
        if self._sent is not None:
            with self._noting_loss(), self._beside():
                self._sent.wait()
        if self._passes is not None:
            self._take_sums_on(self._passes)
        else:
            self._take_sums()
        self._sent = self._sums = None
        self._pending = False
        self.steps += 1

    def _take_sums_on(self, passes: DevicePasses) -> None:
        """Take the sums by kernels, behind what was queued on the stream beside this one."""
        if self.reducer.side is not None:
            torch.accelerator.current_stream().wait_stream(self.reducer.side.stream)
        if self.moments:
            ranks = self.state.process_group.size()
            passes.commit(
                *(self._on_device, self._sums, ranks),
                lambda moment: moment.parameter.grad is not None,
            )

    def _take_sums(self) -> None:
        received: Sequence[torch.Tensor] = ()
        numbers: list[list[float]] = []
        if self._sums is not None:
            means = self._sums.div_(self.state.process_group.size())
            places = self._sum_places_in(means)
            places.condense(means)
            received, numbers = places.split(self._total(means))
        waiting = []
        for i, moment in enumerate(self.moments.values()):
            part, of_part = (received[i], numbers[i]) if received else (None, [])
            if of_part and not of_part[-1]:  # not finite
                part = None
            if moment.commit(part, of_part, used=moment.parameter.grad is not None):
                waiting.append(moment)
        CodedMoment.wait(waiting)

    @property
    def _on_device(self) -> Sequence[DeviceMoment]:
        """The moments, of a device with kernels."""
        return cast("list[DeviceMoment]", list(self.moments.values()))

    def move(self, moments: Sequence[CodedMoment], lr: float, weight_decay: float) -> None:
        """Move parameters of one group by their momenta, which are their gradients."""
        if self._passes is None:
            CodedMoment.move(moments, lr, weight_decay)
        elif moments:
            ours = cast("Sequence[DeviceMoment]", moments)
            self._passes.move(self._on_device, ours, lr, weight_decay)

    def _sum_places_in(self, sums: torch.Tensor) -> SumPlaces:
        sizes = [moment.sums_numel for moment in self.moments.values()]
        if self._sum_places is None or self._sum_places.sizes != sizes:
            self._sum_places = SumPlaces(sizes, sums.device)
        return self._sum_places

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of whole parameters from those that replicas have averaged."""
        return sums

    @property
    def _unused(self) -> bool:
        """Whether gradients may hold momentum that no step has used."""
        return self._pending or self._stale

    @property
    def _touched_moments(self) -> set[str]:
        """The coded parameters that have a momentum to use."""
        return {n for n, moment in self.moments.items() if moment.parameter.grad is not None}

    # ------------------------------------------------------------------ steps

    def before_step(self) -> None:
        """See `Transform`: a step also begins after gradients that were thrown away."""
        if self._lost is not None:  # a later wait for the same operations raises less
            raise self._lost
        if self._unused and self._has_momentum():
            raise Error(
                f"rank {self.state.process_group.rank()}: a backward cannot add to the momentum "
                "that an earlier one has left in the gradients: call optimizer.step() or "
                "zero_grad() between them, or accumulate in no_sync() (FSDP2: "
                "set_requires_gradient_sync(False)) until the last one. In FSDP2 a module that "
                "runs twice in one forward does so, too"
            )
        if self._pending:
            self.reducer.step.discarded.update(self.moments)
            if self._sent is not None:
                self._sent.wait()  # its numbers belong to gradients that were not used
            self._sent = self._sums = None

    def step_begun(self) -> None:
        """See `Transform`."""
        self._stale, self._job = False, None
        self._held.clear()
        self._pending = False  # else the hooks of later buckets would look at no gradient
        if self._added:
            self.take_added()
        self._set_refresh()  # a schedule may have changed the codecs
        self._scale = self._unit()
        for moment in self.moments.values():
            moment.begin()
        if self._passes is not None:
            self._passes.refresh(self._on_device)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Keep the first error that tells of lost ranks, for the next backward to raise."""
        try:
            yield
        except PeerLost as error:
            self._lost = self._lost or error
            raise

    @abstractmethod
    def _has_momentum(self) -> bool:
        """Return whether a gradient holds momentum that no step has used; alike on all ranks."""

    def step_ended(self) -> None:
        """See `Transform`: the second moments travel behind the last bucket."""
        self._pending = True
        moments = self.moments.values()
        if not moments or not self._exchanges_sums:
            return
        if self._passes is not None:
            # Made on backward's stream, on which the step reads it at last.
            sums = self._passes.sums_of(self._on_device)
        with self._beside():
            if self._passes is not None:
                self._passes.collect(self._on_device, sums)
            else:
                sums = torch.cat([moment.local_sums() for moment in moments])
                self._sum_places_in(sums).measure(sums)
            if self.state.process_group.size() > 1:
                self._sent = dist.all_reduce(sums, group=self.state.process_group, async_op=True)
        self._sums = sums

    def _beside(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued behind the reductions by kernels."""
        if self._passes is None or self.reducer.side is None:
            return nullcontext()
        stream = self.reducer.side.stream
        stream.wait_stream(torch.accelerator.current_stream())
        return cast("AbstractContextManager[Any]", stream)

    @property
    def _exchanges_sums(self) -> bool:
        """Whether second moments travel in this step."""
        return self.steps < self._refresh or self.steps % self._refresh == 0

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket: gradients of exact parameters, and the momentum of the others."""
        if self._passes is not None:
            return self._reduce_on(tensor, tuple(names))
        parts = self._parts(tuple(names), tensor)
        if not parts:
            return self.reducer.reduce(tensor, names)
        bucket = self.reducer.bucket_of(tuple(names), tensor.device)
        # Else nodes code the sums of their ranks; and what one rank has sent is the momentum.
        alone = self.state.process_group.size() > 1 and not bucket.levels
        divides = self._divides(names)
        encodings = self._encodings(parts, [None], alone=alone, divides=divides)
        values = [part for _, part, _ in parts]
        room: torch.Tensor | None = None
        befores: list[torch.Tensor | None] = []

        def keep() -> None:
            """Keep what this rank has sent, of values that are coded and not yet averaged."""
            scaled.store_sent(
                [
                    moment.sent(value, piece.residual, self._own_of(piece), None, before)
                    for (moment, _, piece), value, before in zip(
                        parts, values, befores, strict=True
                    )
                ]
            )

        if alone:
            befores = self.reducer.residuals_before((piece for _, _, piece in parts), bucket)
        if alone and self.reducer.coding_of(bucket) is not None:
            self.reducer.encoded = keep
        elif alone:  # what is coded may be gone before anybody can look at it
            room = self._room_for(values)
            sizes = [part.numel() for part in values]
            values = list(torch.split(room[: sum(sizes)], sizes))
            for one, copy in zip(encodings, values, strict=True):
                one.copy = copy
        scaled.encode(encodings)
        future = self.reducer.reduce(tensor, names)

        def restore(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            with self._noting_loss():
                result = done.value()
            if room is not None:
                keep()
                self._spare.append(room)
            self._land([(moment, part) for moment, part, _ in parts], divides=divides)
            return result

        return future.then(restore)

    def _divides(self, names: Sequence[str]) -> bool:
        """Return whether a momentum is divided by d: not where it is not coded, on one rank."""
        return self.state.process_group.size() > 1 or self._scale != 1 or self.reducer.is_fed(names)

    # ------------------------------------------------------------------ kernels of a device

    def _reduce_on(
        self, tensor: torch.Tensor, names: tuple[str, ...]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket whose passes are kernels. Written with few calls, as `_reduce_coded`."""
        assert self._passes is not None
        bucket = self.reducer.buckets.get(names) or self.reducer.bucket_of(names, tensor.device)
        ranks = self.state.process_group.size()
        table: Table | None = bucket.moments
        if table is None or not table.is_current:
            table = bucket.moments = self._table_of(bucket)
        if not table.parts:
            return self.reducer.reduce(tensor, names)
        for moment, piece in table.parts:
            assert piece is not None
            if ranks > 1 and moment.codec is not piece.codec:
                moment.use(piece.codec)
        job = self._job = Job(
            *(self._passes, table, tensor),
            unit=self._scale,
            ranks=ranks,
            looks=self._exchanges_sums,
            divides=ranks > 1 or self._divides(names),
            copies=table.own is not None and self.reducer.coding_of(bucket) is None,
        )
        if not self._encodes_beside(bucket):
            self._encode_now(job, bucket)
            self._held.append(job)
        future = self.reducer.reduce(tensor, names)
        if self._job is None:  # `exchange` has finished it
            return future
        self._job = None

        def finish(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            with self._noting_loss():
                result = done.value()
            if job.keeps:
                job.sent()
            job.land()
            return result

        if ranks == 1 and future.done():
            finish(future)
            return future
        return future.then(finish)

    def _table_of(self, bucket: Bucket) -> Table:
        parts = [(self.moments[p.name], p) for p in bucket.pieces if p.name in self.moments]
        own = None
        if self.state.process_group.size() > 1 and not bucket.levels:
            own = [self._own_of(piece) for _, piece in parts]
        return Table([(cast("DeviceMoment", moment), piece) for moment, piece in parts], own)

    def _encodes_beside(self, bucket: Bucket) -> bool:
        """Return whether `exchange` may encode, as what comes before it has nothing to change."""
        choice = bucket.agreed.paths.get(("all_reduce", False))
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
        job.encode(scale=self._scale_on)
        if job.keeps:
            pieces = (piece for piece in bucket.pieces if piece.name in self.moments)
            job.befores = self.reducer.residuals_before(pieces, bucket)

    def _scale_on(self, moments: Sequence[DeviceMoment]) -> None:
        def sum_up(sums: torch.Tensor) -> int:
            if self.state.process_group.size() > 1:
                dist.all_reduce(sums, group=self.state.process_group)
            return self.state.process_group.size()

        assert self._passes is not None
        self._passes.scale(moments, sum_up)

    def exchange(
        self,
        tensor: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        finish: Callable[[torch.Tensor], object] | None = None,
        **options: Any,
    ) -> torch.Tensor | None:
        """See `BucketReducer`; kernels make the momentum of the gradients before it, and after."""
        job, self._job = self._job, None
        if job is None:
            return self.reducer.exchange(tensor, bucket, group, finish, **options)
        if not job.encoded:
            job.encode(options.get("swapped"))
        single = job.keeps and bool(bucket.single)
        if single:
            self.reducer.encoded = job.sent
        try:
            finite = self.reducer.exchange(tensor, bucket, group, finish, **options)
        except PeerLost as error:
            self._lost = self._lost or error
            raise
        if job.keeps and not single:
            job.sent()
        job.land()
        return finite

    # ------------------------------------------------------------------ what a rank has sent

    def _own_of(self, piece: BucketPiece) -> Residual:
        return self.own.get(
            piece.name,
            piece.numel,
            self.reducer.device,
            rows=self.reducer.layout.rows,
            codec=piece.codec,
        )

    def _sent_before(self, piece: BucketPiece, shard: int | None = None) -> torch.Tensor | None:
        """Return o [numel of the shard] as it is stored; None: nothing is kept.

        Args:
            shard: its number, in a reduce-scatter; None: that which replicas average.
        """
        if piece.name not in self.own:
            return None
        own = self._own_of(piece)
        return own.stored_worker(shard or 0) if own.last_step else None

    def _room_for(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return memory for copies of values, which is given back to `_spare`.

        It is used again: pages of new memory would cost more than the copy.
        """
        numel, dtype = sum(part.numel() for part in values), values[0].dtype
        for i, spare in enumerate(self._spare):
            if spare.dtype == dtype and spare.numel() >= numel:
                return self._spare.pop(i)
        self._spare.clear()  # what is too small now
        return values[0].new_empty(numel)

    def _parts(
        self, names: tuple[str, ...], tensor: torch.Tensor
    ) -> list[tuple[CodedMoment, torch.Tensor, BucketPiece]]:
        """Return the coded parameters of a bucket, with their places in its last dimension."""
        found = [(name, self.moments[name]) for name in names if name in self.moments]
        if not found:
            return []
        bucket = self.reducer.bucket_of(names, tensor.device)
        pieces = {piece.name: piece for piece in bucket.pieces}
        parts = []
        for name, moment in found:
            piece = pieces[name]
            if self.state.process_group.size() > 1:
                moment.use(piece.codec)
            part = tensor[..., piece.offset : piece.offset + piece.numel]
            parts.append((moment, part, piece))
        return parts

    def _encodings(
        self,
        parts: Sequence[tuple[CodedMoment, torch.Tensor, BucketPiece]],
        shards: Sequence[int | None],
        *,
        alone: bool = True,
        divides: bool = True,
    ) -> list[scaled.Encoding]:
        """Return what `scaled.encode` makes of gradients; ranks exchange missing second moments.

        Args:
            parts: coded parameters with their gradients [numel], or [shards, numel].
            shards: numbers of the shards in a reduce-scatter; [None]: each has its own, or all.
            alone: this rank goes on from what itself has sent.
            divides: see `CodedMoment.encoding`.
        """
        places = [
            (moment, part if shard is None else part[shard], piece, shard)
            for moment, part, piece in parts
            for shard in shards
        ]
        new = {id(moment): moment for moment, _, _ in parts if not moment.has_scale}
        for moment, part, _, shard in places:
            if id(moment) in new:
                moment.enter(part, self._scale, shard)
        if new:
            moments = list(new.values())
            sums = torch.cat([moment.local_sums() for moment in moments])
            if self.state.process_group.size() > 1:
                dist.all_reduce(sums, group=self.state.process_group)
                sums.div_(self.state.process_group.size())
            totals = torch.split(self._total(sums), [moment.sums_numel for moment in moments])
            for moment, total in zip(moments, totals, strict=True):
                moment.provide(total)
        looks = self._exchanges_sums
        return [
            moment.encoding(
                *(part, self._scale, piece.residual),
                self._sent_before(piece, shard) if alone else None,
                shard,
                entered=id(moment) in new,
                looks=looks,
                divides=divides,
            )
            for moment, part, piece, shard in places
        ]

    def _land(
        self, places: Sequence[tuple[CodedMoment, torch.Tensor]], *, divides: bool = True
    ) -> None:
        """Make the ranks' means momenta; see `CodedMoment.landing`."""
        landings = [moment.landing(place, divides=divides) for moment, place in places]
        probes = scaled.land(landings, self._scale)
        for (moment, _), probe in zip(places, probes, strict=True):
            moment.land(probe)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Transform`: what this rank has sent of the momentum."""
        return {f"own{dist.get_rank()}": (self.state.step, self.own.state_dict())}

    def keys(self, before: int) -> list[str]:
        """See `Transform`."""
        return [key.replace("rank", "own") for key in self.state.needed(before)]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `Transform`."""
        self.own.clear()
        (about,) = saved["about"]
        before = about["world_size"]
        own = [residuals_of(saved, key, about["step"]) for key in self.keys(before)]
        own = known(own, self.reducer.numbers, tell=False)
        self.own.load_state_dict(self.state.resharded(own, before), self.state.codecs)
