"""Bucket reducer: averages buckets over a group by their parameters' codecs and residuals.

A `CompressionState` has one, and says when a step begins and ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycomm import backend
from pycomm._build import load_c10d
from pycomm.arguments import whole
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback, Residuals
from pycomm.feedback.residual import ALL, Spans
from pycomm.feedback.rule import EXACT
from pycomm.log import tell
from pycomm.policy import (
    CODED,
    Parameter,
    Plan,
    Policy,
    refused_together,
)
from pycomm.policy.names import few
from pycomm.reduction import coding, members, paths, two_shot
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.bucket import Bucket, BucketPiece
from pycomm.reduction.factors import Factors, Matrix, errs_alike, is_divided, is_look
from pycomm.reduction.nodes import Nodes, find_levels
from pycomm.reduction.own_group import ExchangeThread
from pycomm.reduction.side_stream import SideStream
from pycomm.reduction.single_coding import SingleCoding
from pycomm.reduction.step import Step, StepStatus
from pycomm.reduction.weights import weigh


class BucketReducer:
    """Codecs and residuals of the parameters that one group of ranks reduces, bucket by bucket.

    Arguments and errors are those of `CompressionState`.
    """

    def __init__(
        self,
        codec: str | Codec | Policy,
        *,
        process_group: dist.ProcessGroup | None,
        feedback: bool | str | Feedback | None,
        seed: int,
        adapter: Adapter,
        transform: Any,
    ) -> None:
        process_group = process_group or dist.group.WORLD
        if process_group is None:
            raise Error("there is no process group: call init_process_group first")
        self.process_group: dist.ProcessGroup = process_group
        self.layout = adapter.layout
        groups = self.layout.groups(process_group)[::-1]
        with refused_together(*groups):
            seed = whole("seed", seed, 0, 2**64 - 1)
            rule = Feedback.of(feedback)
            self._kind = rule.kind if rule else None
            options = (f"feedback={rule}", f"seed={seed}")
            self.plan = Plan(Policy.of(codec), *groups, options=options)
        self.residuals = Residuals(rule, process_group.size()) if rule else None
        self.seed = seed
        self.step = Step(0, StepStatus.COMMITTED)
        """The current step."""
        self.transform = transform
        """What takes the place of the gradients before they are coded: the `Momenta` of an
        optimizer, which says what its methods do; None: nothing does. Its coarse payloads are
        gathered, or answered without a residual (see `pycomm.reduction.single_coding`), and its
        matrices have no factors."""
        self.average = "ranks"
        """"senders": a value of a sparse payload is averaged over the ranks that have sent it."""
        self.weights: list[float] | None = None
        """Of each rank, what its contribution to this step is multiplied by; None: by 1."""
        self.by_name: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}  # by id of these
        self.numbers: dict[str, int] = {}
        self.device = self.layout.device or torch.device("cpu")
        self.buckets: dict[tuple[str, ...], Bucket] = {}
        self.agreed: dict[tuple[str, ...], dict[tuple[str, bool], paths.ChosenPath]] = {}
        """The paths of buckets that the members have compared; equal on all ranks."""
        self.factors = Factors()
        self.side: SideStream | None = None  # of the device, where hooks exchange payloads
        self.nodes: Nodes | None = None  # where hooks exchange payloads by nodes
        self.flat_because = ""
        """Why ranks of nodes code alike; "": they do not, or there are no nodes."""
        self.thread: ExchangeThread | None = None  # that does so beside backward, of host tensors
        self.formed_with = self.formed()
        """How often the group's members had been set when these codecs were compared."""
        self._told = 0  # bytes of residuals that were reported, the most so far
        self.encoded: Callable[[], None] | None = None
        """Is called once, by the next reduction of which `coding_of` tells."""

    def formed(self) -> int:
        """Return how often the group's members have been set; 0: it keeps its members."""
        return getattr(backend.find(self.process_group), "formed", 0)

    def find_nodes(self, device: torch.device) -> None:
        """Let hooks reduce values of a device by nodes, unless the backend does it; collective."""
        group = self.process_group
        if group.size() == 1 or self.formed_with:
            return
        if device.type == "cpu" and backend.find(group):
            return
        levels = find_levels(group, device)
        if not levels:
            return
        if self._kind == "momentum":
            why = "momentum is of what each rank sends: residual or decay goes by nodes"
        elif len(set(Counter(levels).values())) > 1:
            why = "nodes have unequal numbers of ranks: equal ones go by nodes"
        else:
            self.nodes = Nodes(group, levels, device)
            return
        self.flat_because = f"flat, since {why}"

    def add(self, name: str, parameter: torch.Tensor, *, exact: str = "") -> None:
        """Enter a parameter, or the part of it that is reduced here; in one order on all ranks.

        A parameter with a known name replaces the old one, and keeps its residual if the shape is
        the same.

        Args:
            name: name of the parameter.
            parameter: tensor with its shape, dtype and device.
            exact: reason to send it exactly whatever the policy says; "": none. The transform may
                have another one.
        """
        if self.transform is not None:
            exact = self.transform.exact(parameter) or exact
        if not self.numbers and self.layout.device is None:
            self.device = parameter.device
        if name in self.numbers:
            self.forget_buckets({name})
        self.put(name, parameter)
        self.numbers.setdefault(name, len(self.numbers))
        shape = (*parameter.shape, 2) if parameter.is_complex() else parameter.shape
        before = self.plan.decisions.get(name)
        if before is not None and before.parameter.shape != shape:
            self.factors.forget(name)
            if self.residuals:
                self.residuals.forget(name)
        self.plan.add(Parameter(name, tuple(shape), parameter.dtype, exact))
        if self.transform is not None:
            self.transform.entered(name)

    def put(self, name: str, parameter: torch.Tensor) -> None:
        """Let a tensor be the parameter of a name, in the place of another one."""
        if name in self.by_name:
            self.names.pop(id(self.by_name[name]), None)
        self.by_name[name] = parameter
        self.names[id(parameter)] = name

    def agree(self) -> None:
        """Check that all ranks have decided alike, and report the residuals' memory; collective.

        The report comes before any residual is allocated. See `Plan.agree`. `reduce` also calls it,
        for parameters that it has not seen before.
        """
        self.plan.agree(self.device)
        taken = self.residual_bytes
        if taken > self._told and self.process_group.size() > 1:
            self._told = taken  # so that trials of "auto", and schedules, report it once
            if self.process_group.rank() == 0:
                tell(self.memory_text())

    @property
    def residual_bytes(self) -> int:
        """Memory of the residuals on this rank when all of them have been written, in bytes."""
        if self.residuals is None:
            return 0
        parts = [self.layout.part(decision) for decision in self.plan.decisions.values()]
        form = self.layout.rows, self.shards
        each = (self.residuals.bytes_for(p.codec, p.parameter.numel, *form) for p in parts)
        # What was sent of a momentum is kept beside them.
        return sum(each) * (2 if self.transform else 1)

    def memory_text(self) -> str:
        """Return the memory of the residuals as a line of text; empty if there are none."""
        taken = self.residual_bytes
        if not taken:
            return ""
        values = sum(decision.parameter.numel for decision in self.plan.decisions.values())
        return (
            f"feedback: residuals take up to {taken / 1e6:.3g} MB on each rank, "
            f"{taken / values:.2g} bytes for each of {values} values "
            f"({self.residuals.rule if self.residuals else None})"
        )

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the group, in place.

        Args:
            tensor: the gradients of the named parameters, one behind the other. float32, or 16-bit
                floats, which are summed in float32 and rounded once. Other dtypes and sparse
                tensors are averaged exactly. Complex numbers are passed as two reals each, like
                DDP's, and travel exactly.
            names: names as given to `add`; equal on all ranks.

        Returns:
            A future of `tensor`.

        Raises:
            Error: the tensor has another number of values than the parameters.
        """
        if self.weights is not None:
            weigh(tensor, self.weights[self.process_group.rank()])
        if self.process_group.size() == 1 and not self.is_fed(names):
            return completed(tensor)
        if tensor.dtype not in CODED or tensor.is_sparse:
            return self._reduce_plain(tensor)
        key = tuple(names)
        bucket = self.buckets.get(key) or self.bucket_of(key, tensor.device)
        if bucket.numel != tensor.numel():
            raise Error(
                f"rank {self.process_group.rank()}: a bucket has {tensor.numel()} values, and its "
                f"parameters, from {names[0]} on, have {bucket.numel}: were they replaced after "
                "pycomm.compress? Wrap and compress the model anew"
            )
        return self._reduce_coded(tensor, bucket)

    def wait(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Wait for a future of `reduce`, so that a signal can end the wait; see `backend.wait`."""
        value: torch.Tensor = backend.wait(future, self.process_group)
        return value

    def check_operations(self) -> None:
        """Raise the error of an operation on device tensors for which only streams have waited.

        Its results are not finite; this tells a failure from an overflow.
        """
        if self.device.type == "cpu":
            return
        ours = backend.find(self.process_group, self.device)
        if ours is not None:
            ours.check()
        if self.nodes is not None:
            self.nodes.check(self.device)

    def _reduce_coded(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        # A step calls this for every bucket: what is rare is a flag, so that it costs no call.
        step = self.step
        if self.factors.sums is not None:
            self.factors.look(tensor, bucket, self.matrix)
        divided = bool(self.factors.current) and self._divide(tensor, bucket)
        step.pieces.update(bucket.with_residual)
        for residual in bucket.residuals:
            if residual is not None and (residual.in_place or residual.layouts != bucket.layouts):
                self.settle_deferred()
                self._use(bucket, tensor)
                break
        step.flushed |= bucket.flushed
        probe = None
        if self.plan.sampled:
            self.settle_deferred()
            probe = self.plan.probe(tensor, bucket.pieces, self._residual_of)
        senders = None
        if self.average == "senders" and bucket.gathers:
            # A rank of weight 0 may still send a part of its residual, which was weighted earlier.
            weights = self.weights or [1.0] * self.process_group.size()
            senders = [weight or 1.0 for weight in weights]
        choice = bucket.paths.get(("all_reduce", senders is not None))
        if self.transform is not None and (single := self.coding_of(bucket)) is not None:
            choice = bucket.paths["all_reduce", False] = single.path(bucket, tensor)
        elif choice is None:
            choice = paths.chosen(
                bucket, self.process_group, "all_reduce", tensor, senders=senders is not None
            )

        def land(result: torch.Tensor) -> torch.Tensor:
            if probe is not None:
                probe.finish(result)
            if divided:
                self.factors.scale(result, bucket, 1)
            return result

        finish = land if probe is not None or divided else None
        native = choice.native
        if native is not None:
            work = native.compressed_all_reduce(
                tensor, bucket.native, bucket.sides, self.seed, step.number
            )
            step.checks.append(lambda: work.finite)
            coded: torch.futures.Future[torch.Tensor]
            if tensor.is_cpu and finish is None:
                coded = work.get_future()
                return coded
            # For tensors that are not on the CPU, the work's result is a list.
            last = land if tensor.is_cpu else lambda results: land(results[0])
            coded = load_c10d().then(work, last)
            return coded
        options: dict[str, Any] = {"seed": self.seed, "step": step.number}
        if senders is not None:
            options["senders"] = senders
        exchange = (self.transform or self).exchange
        if self.thread is not None and not bucket.single:
            group = self.thread.group
            options["found_inf"] = step.found_inf[tensor.device]
            coded, has_come = self.thread.run(
                tensor, lambda: exchange(tensor, bucket, group, finish, **options)
            )
            step.checks.append(has_come)
            return coded
        future: Any = torch._C.Future([] if tensor.is_cpu else [tensor.device])
        stream = None
        decides = not tensor.is_cpu and choice.path.decides
        if not tensor.is_cpu:
            side = self.side = self.side or SideStream(tensor.device)
            if decides:
                if side.ahead is not None and not bucket.with_residual.keys() <= side.ahead:
                    self.settle_deferred()  # the flag is not about the sides of the others
                side.open = True
                options |= side.flags
            else:
                self.settle_deferred()
            stream = side.stream
            stream.wait_stream(torch._C._accelerator_getStream(tensor.device.index))
            stream.__enter__()  # last: an error must not leave it the current one
        try:
            if not decides:
                options["found_inf"] = step.found_inf[tensor.device]
            exchange(tensor, bucket, self.process_group, finish, **options)
            future.set_result(tensor)
        finally:
            if stream is not None:
                stream.__exit__(None, None, None)
        return future  # type: ignore[no-any-return]

    def exchange(
        self,
        tensor: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        finish: Callable[[torch.Tensor], object] | None = None,
        **options: Any,
    ) -> None:
        """Average a bucket; Python moves the payloads. See `two_shot.all_reduce`."""
        values = tensor if tensor.is_contiguous() else tensor.contiguous()
        if bucket.single:
            encoded, self.encoded = self.encoded, None
            bucket.single.average(values, bucket, encoded=encoded, **options)
        elif self.nodes is not None and bucket.levels:
            self.nodes.all_reduce(values, bucket, **options)
        else:
            two_shot.all_reduce(values, bucket, group, **options)
        if values is not tensor:
            tensor.copy_(values)
        if finish is not None:
            finish(tensor)

    def all_finite(self) -> bool:
        """Wait for this step's buckets; return whether their results are finite."""
        finite, side = all([check() for check in self.step.checks]), self.side
        for flag in self.step.found_inf.values():
            finite &= not (bool(flag) if flag.is_cpu or side is None else side.read(flag))
        if side is not None and side.open:
            finite &= side.end_step()
        return finite

    @property
    def has_results(self) -> bool:
        """Whether buckets have been reduced since the last step was settled, or an error has ended
        the reduction of one that had begun to use its residuals."""
        step = self.step
        if step.checks or step.pieces or step.found_inf:
            return True
        return self.side is not None and self.side.open

    def settle_deferred(self) -> None:
        """Let the host know of the steps about which the device has decided; see `SideStream`."""
        side, before = self.side, self.plan.overflows
        if side is None or side.ahead is None:
            return
        swapped = side.settle()
        self.plan.overflows += side.hear()
        if self.residuals:
            self.residuals.swap(swapped)
        if self.plan.overflows > before:
            self.check_operations()

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> None:
        """Sum or average all ranks' rows, and wait for it; this rank gets its row.

        Args:
            output: floats of 16 or 32 bits [values]; this rank's parts of the named parameters, as
                `part` cuts them.
            input: the parts of every rank [ranks * values].
            names: the parameters, in the order of a row.
            group: the ranks that reduce.
            average: divide by the number of ranks.
        """
        bucket = self.bucket_of(tuple(names), input.device)
        step = self.step
        if self.factors.sums is not None:
            self.factors.look(input, bucket, self.matrix)
        divided = bool(self.factors.current) and self._divide(input, bucket)
        step.pieces.update(bucket.with_residual)
        self._use(bucket, input)
        step.flushed |= bucket.flushed
        probe = self.plan.probe(
            input, bucket.pieces, self._residual_of, rows=self.layout.rows, average=average
        )
        native = paths.chosen(bucket, group, "reduce_scatter", output).native
        if native is not None:
            work = native.compressed_reduce_scatter(
                output, input, bucket.native, bucket.sides, self.seed, step.number, average
            )
            step.checks.append(lambda: work.finite)
            work.wait()
        else:
            options: dict[str, Any] = {"seed": self.seed, "step": step.number}
            options |= {"average": average, "found_inf": step.found_inf[output.device]}
            if self.nodes is not None and bucket.levels:
                self.nodes.reduce_scatter(output, input, bucket, **options)
            else:
                two_shot.reduce_scatter(output, input, bucket, group, **options)
        if probe is not None:
            probe.finish(output)
        if divided:
            self.factors.scale(output, bucket, 1)

    def _use(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Prepare the residuals of a bucket that is reduced in this step."""
        ranks, gradient = self.process_group.size(), None
        for name, piece in bucket.with_residual.items():
            residual = piece.residual
            if residual is not None and (residual.in_place or residual.layouts != bucket.layouts):
                if bucket.levels:
                    rows = tensor.view(bucket.rows, -1)
                    gradient = rows[:, piece.offset : piece.offset + piece.numel]
                residual.use(bucket.layout, ranks, gradient, bucket.spans[name])
        bucket.follow_memory()

    def is_fed(self, names: Sequence[str]) -> bool:
        """Return whether feedback adds to these gradients, even in a group of one rank."""
        return self.residuals is not None and (
            self.residuals.rule.kind == "momentum" or any(n in self.residuals for n in names)
        )

    def _residual_of(self, name: str, begin: int, end: int, row: int) -> torch.Tensor | None:
        return self.residuals.added(name, begin, end, row) if self.residuals else None

    def _reduce_plain(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average by the group's own all_reduce, exactly, as DDP does without a hook: float64 and
        sparse tensors, which codecs refuse."""
        verdict: list[bool] = []

        def look(result: torch.Tensor) -> torch.Tensor:
            values = result._values() if result.is_sparse else result
            verdict.append(bool(values.isfinite().all()))
            return result

        self.step.checks.append(lambda: verdict == [True])
        group = self.process_group
        tensor.div_(group.size())
        work = dist.all_reduce(tensor, group=group, async_op=True)
        plain: torch.futures.Future[torch.Tensor]
        if backend.find(group, tensor.device):
            plain = load_c10d().then(work, lambda results: look(results[0]))
        else:
            plain = work.get_future().then(lambda future: look(future.value()[0]))
        return plain

    def bucket_of(self, names: tuple[str, ...], device: torch.device) -> Bucket:
        bucket = self.buckets.get(names)
        if bucket is None:
            self.settle_deferred()  # residuals may change their form
            self.agree()
            if names not in self.agreed:
                if self.formed_with and self.process_group.size() > 1:
                    members.compare_bucket(names, self.process_group, self.device)
                self.agreed[names] = {}
            decisions = [self.layout.part(self.plan.decisions[name]) for name in names]
            if self.process_group.size() == 1:  # sends residuals of a checkpoint of more ranks
                decisions = [replace(decision, codec=EXACT) for decision in decisions]
            numbers = [self.numbers[name] for name in names]
            native = backend.find(self.process_group) if device.type == "cpu" else None
            alone = self.average == "senders" or self.layout.rows > 1  # each rank sends for itself
            owned = native if native and not alone else None
            nodes = self.nodes if native is None and self.average == "ranks" else None
            bucket = Bucket(
                decisions,
                numbers,
                self.residuals,
                device,
                rows=self.layout.rows,
                levels=owned.levels if owned else nodes.levels if nodes else (),
                shares=owned.shares if owned else (),
                paths=self.agreed[names],
                held=partial(self.held, nodes=nodes) if device.type != "cpu" else None,
            )
            self.buckets[names] = bucket
        return bucket

    def coding_of(self, bucket: Bucket) -> SingleCoding | None:
        """Return how a bucket that is coded once is averaged; None: as gradients are."""
        if bucket.single is None:  # it is asked for several times a step
            bucket.single = SingleCoding.of(bucket, self.process_group) or False
        return bucket.single or None

    def residuals_before(
        self, pieces: Iterable[BucketPiece], bucket: Bucket
    ) -> list[torch.Tensor | None]:
        """Return copies of worker residuals that the coding of this step overwrites; else None.

        It does so if the bucket has another layout than the last one: `Residual.use` writes what
        the worker and the owner residual are together to where the new one is written.

        Args:
            pieces: some of the bucket.
            bucket: a bucket that is reduced next, without levels.

        Returns:
            Of each piece the residual as it is stored.
        """
        found: list[torch.Tensor | None] = []
        ranks = self.process_group.size()
        for piece in pieces:
            found.append(None)
            residual = piece.residual
            if residual is not None and residual.worker is not None:
                residual.use(bucket.layout, ranks, spans=bucket.spans[piece.name])
                if residual.in_place:
                    found[-1] = residual.stored_worker().clone()
        bucket.follow_memory()
        return found

    def held(self, pieces: Sequence[BucketPiece], nodes: Nodes | None) -> list[Spans]:
        """Return which values of each piece have residuals on this rank, by role.

        Args:
            pieces: those of a bucket.
            nodes: by which the bucket is reduced; None: flat.
        """
        if self.transform is not None and nodes is not None:  # a coarse payload has all values
            return [ALL] * len(pieces)
        group = self.process_group
        flat: tuple[int, int, coding.Runs] = group.rank(), group.size(), coding.whole(pieces)
        rank, ranks, runs = flat if nodes is None else nodes.part_of(pieces)
        owned = coding.all_reduce_plan(runs, ranks).owned
        contributed = coding.spans(pieces, runs)
        kept = coding.spans(pieces, owned[rank] if owned else ())
        roles = zip(contributed, kept, strict=True)
        return [{"worker": worker, "owner": own} for worker, own in roles]

    @property
    def shards(self) -> int:
        """Number of ranks of a node that code a part of its sum each; 1: ranks code all values."""
        levels: Sequence[int] = self.nodes.levels if self.nodes else ()
        if self.device.type == "cpu" and not self.nodes and self._kind != "momentum":
            native = backend.find(self.process_group)
            levels = native.levels if native and self.average == "ranks" else ()
        alone = self.layout.rows > 1 or self.transform is not None
        return 1 if alone else min(Counter(levels).values(), default=1)

    def begin_factors(self, *, anew: bool) -> None:
        """Let the factors of the last look hold, and begin another one if it is time; in a new
        step.

        Args:
            anew: parameters or their codecs have changed.
        """
        factors, step = self.factors, self.step
        if factors.moved or anew:
            new = factors.begin(self.matrix, self.shape, self.residuals, self.settle_deferred)
            if new:
                self.plan.events.append(
                    f"step {step.number}: rows or columns differ, and are divided by "
                    f"{factors.span(new)} before they are coded: {few(sorted(new))}"
                )
        looks = (self.transform is None and self.process_group.size() > 1) and (
            is_look(step.number) or (anew and not factors.knows(self._matrices()))
        )
        factors.sums = {} if looks else None  # an error may have ended the last look

    def end_buckets(self) -> None:
        """End a look at rows and columns after a step's buckets, and tell all ranks whether the
        rows of each are finite; collective."""
        if self.factors.sums is not None:
            groups = self.layout.groups(self.process_group)
            self.factors.end(self._matrices(), groups, self.device)
        for flag in self.step.found_inf.values() if self.layout.scatters else ():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.process_group)

    def _matrices(self) -> dict[str, Matrix]:
        """Return all parameters that may get factors now."""
        found = {name: self.matrix(name) for name in self.plan.decisions}
        return {name: matrix for name, matrix in found.items() if matrix is not None}

    def _divide(self, values: torch.Tensor, bucket: Bucket) -> bool:
        """Divide a bucket [rows * values] by its factors; return whether it has any."""
        if self.factors.current.keys().isdisjoint(bucket.spans):
            return False
        if values.dtype == torch.float16:  # of a checkpoint: it has no room for them
            self.settle_deferred()
            names = {piece.name for piece in bucket.pieces}
            self.factors.leave(names, self.shape, self.residuals)
            return False
        self.factors.scale(values, bucket, -1)
        return True

    def matrix(self, name: str) -> Matrix | None:
        """Return a parameter as a matrix, if its rows and columns may get factors now."""
        decision = self.plan.decisions.get(name)
        if decision is None or not self.plan.policy.factors or not is_divided(decision.codec):
            return None
        found = self.shape(name)
        if found is None:
            return None
        codec = decision.codec
        return replace(found, by_rows=codec.combine != "gather", forgets=errs_alike(codec))

    def shape(self, name: str) -> Matrix | None:
        """Return a parameter as a matrix, whatever its codec; None: there are no whole rows."""
        decision = self.plan.decisions.get(name)
        if decision is None or self.transform is not None:
            return None
        return self.layout.matrix(decision)

    def forget_buckets(self, names: Set[str] | None = None, *, alone: bool = False) -> None:
        """Make the buckets of some parameters anew when they are reduced next; None: all.

        Args:
            names: the parameters.
            alone: only this rank may do so: what the ranks have agreed on stays.
        """
        everything: list[dict[tuple[str, ...], Any]] = [self.buckets]
        if not alone:
            everything.append(self.agreed)
        for kept in everything:
            for bucket in [one for one in kept if names is None or not names.isdisjoint(one)]:
                del kept[bucket]


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future of a tensor, for hooks that have nothing to wait for."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
