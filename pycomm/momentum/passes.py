"""The passes of csrc/optim over moments: what runs them, on which matrices, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.codecs.implementations import Launcher, current_stream, of_kernels
from pycomm.errors import Error
from pycomm.feedback import Residual, storage
from pycomm.momentum.moment import CodedMoment, local
from pycomm.policy.rules import CODED
from pycomm.reduction.bucket import BucketPiece

DTYPES = {dtype: core_dtype(dtype) for dtype in CODED}
FORMS = {torch.float32: 0, torch.uint8: 1, torch.bfloat16: 2, torch.float16: 3}
"""Numbers of stored values' forms, csrc/optim/moments_params.h."""

Part = tuple[CodedMoment, "BucketPiece | None"]
"""A matrix, and its place in a bucket."""


class Kernels:
    """What runs the passes of csrc/optim on a device.

    Args:
        device: the device.
        launch: what starts kernels there; None: C++ does, or it works on the host.
    """

    def __init__(self, device: torch.device, launch: Launcher | None = None) -> None:
        self.device, self._launch = device, launch
        self.on_host = device.type == "cpu" and launch is None

    @staticmethod
    def find(device: torch.device) -> Kernels:
        """Return what runs the kernels of a device, or the same on the host.

        Raises:
            Error: the kernels do not run on the device.
        """
        if device.type == "cpu":
            return Kernels(device)
        way = of_kernels("moments", device.type)
        if way is None:
            raise Error(
                f"coded optimizers have kernels for CUDA devices, and none for {device.type}: "
                "move the model to the CPU, or compress gradients with pycomm.compress"
            )
        return Kernels(device, getattr(way, "launch", None))

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call C++, which works on the host, or queues on torch's current stream."""
        if self._launch is not None:
            self._launch(_C.recorded(function, *args, 0), self.device)
        elif self.on_host:
            function(*args, torch.get_num_threads())
        else:
            with torch.cuda.device(self.device):
                function(*args, current_stream(self.device))


def written(parameters: Any) -> None:
    """Tell autograd that C++ has written parameters, a tensor or some.

    A graph that was kept with their old values then refuses a backward, as after an operation of
    torch.
    """
    torch.autograd.graph.increment_version(parameters)


class Table:
    """Matrices, and the addresses of all that the passes read and write for them.

    Args:
        kernels: what runs the passes.
        parts: the matrices.
        own: where what was sent of each is kept; None: nowhere.
        shards: number of shards of each that this rank codes, one behind the other; 1: its own.
        numel: values of a bucket's shard.
    """

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[Part],
        own: Sequence[Residual] | None = None,
        shards: int = 1,
        numel: int = 0,
    ) -> None:
        self.parts, self.own, self.shards = list(parts), own, shards
        self.native = _C.Moments(kernels.on_host)
        """The shards that are coded."""
        self.landed = _C.Moments(kernels.on_host) if shards > 1 else self.native
        """This rank's own shards."""
        self._at = [_checked(moment) for moment, _ in parts]
        self.numbers = {id(moment): i for i, (moment, _) in enumerate(parts)}
        """Of the moments, by id."""
        self.sums_numel = 0
        for i, (moment, piece) in enumerate(parts):
            if moment.device.type != kernels.device.type:
                raise Error(
                    f"{moment.optimizer}: parameters are on {moment.device}, and gradients are "
                    f"reduced on {kernels.device}: leave out CPUOffloadPolicy"
                )
            offset = piece.offset if piece else 0
            residual, sent = piece.residual if piece else None, own[i] if own is not None else None
            for shard in range(shards) if shards > 1 else ():
                place = offset + shard * numel
                self._add(self.native, moment, place, (shard, shard, shards), residual, sent)
            self._add(self.landed, moment, offset, (moment.shard, 0, 1), residual, sent)
            self.sums_numel += moment.sums_numel

    def _add(
        self,
        to: _C.Moments,
        moment: CodedMoment,
        offset: int,
        shard: tuple[int, int, int],
        residual: Residual | None,
        own: Residual | None,
    ) -> None:
        """Add a shard: its number, that among those that are coded here, and their number."""
        (number, row, rows), state = shard, moment.state
        momentum = local(state[moment.key])
        to.add(
            (offset, self.sums_numel),
            (moment.rows, moment.columns, number * moment.padded, moment.padded, row, rows),
            [
                moment.room.data_ptr(),
                *(state[key].data_ptr() for key in ("row", "column", "heard")),
            ],
            (momentum.data_ptr(), FORMS[momentum.dtype]),
            _sides(residual, row),
            _sides(own, row),
        )

    @property
    def is_current(self) -> bool:
        """Whether addresses are still those: a state may have been loaded since."""
        for (moment, _), (momentum, at) in zip(self.parts, self._at, strict=True):
            state = moment.state  # without a call of Python
            if state[moment.key] is not momentum or state["row"].data_ptr() != at:
                return False
        return True


def _checked(moment: CodedMoment) -> tuple[torch.Tensor, int]:
    """Return what tells one state from another, whose tensors lie without gaps."""
    state = moment.state
    for key in (moment.key, "row", "column", "heard"):
        if not local(state[key]).is_contiguous():  # of a checkpoint
            state[key] = state[key].contiguous()
    return state[moment.key], state["row"].data_ptr()


def _sides(residual: Residual | None, row: int) -> tuple[int, int, int]:
    if residual is None or residual.worker is None:
        return 0, 0, 0
    first, second = residual.worker
    before = row * storage.count(residual.rule.storage, residual.numel)
    return first.data_ptr() + before, second.data_ptr() + before, FORMS[first.dtype]


class Passes:
    """The passes over all moments of a state, which wait for nothing on a device.

    Args:
        kernels: what runs them.
        moments: the moments, by name; there may be more later.
    """

    def __init__(self, kernels: Kernels, moments: Mapping[str, CodedMoment]) -> None:
        self.kernels, self.call, self._moments = kernels, kernels.call, moments
        self._all: Table | None = None

    def scale(self, moments: Sequence[CodedMoment], sum_up: Callable[[torch.Tensor], int]) -> None:
        """Make the ranks' sums of this step the scale of the first coding of these moments.

        Args:
            moments: those without second moments.
            sum_up: function that adds a tensor up over the ranks, and returns the number of those
                that have a gradient of the same rows.
        """
        table = Table(self.kernels, [(moment, None) for moment in moments])
        sums = self.room_for_sums(table)
        self.call(table.native.collect, sums.data_ptr())
        ranks = sum_up(sums)
        how = [(_C.MomentUse.scale, 0.0, 0.0)] * len(moments)
        self.call(table.native.commit, sums.data_ptr(), how, ranks)
        for moment in moments:
            moment.knows = True

    def room_for_sums(self, table: Table | None = None) -> torch.Tensor:
        """Return memory for the sums of a table's moments; None: of all."""
        numel = (table or self._table()).sums_numel
        return torch.empty(numel, dtype=torch.float32, device=self.kernels.device)

    def collect(self, sums: torch.Tensor) -> None:
        """Write this rank's mean sums of the steps since the last exchange, of all moments."""
        for moment in self._moments.values():
            moment.complete()
        self.call(self._table().native.collect, sums.data_ptr())

    def commit(self, sums: torch.Tensor | None, ranks: int, idle: Set[str] = frozenset()) -> None:
        """Fold the ranks' sums into the second moments, and compute the factors.

        All ranks count the step, also a rank whose squares overflow and are left out: the ranks'
        number of steps decides how far second moments decay and values move.

        Args:
            sums: the total of what `collect` wrote, over the ranks; None: it did not travel.
            ranks: the number of those that have a gradient of the same rows.
            idle: names of moments that take no part in the step, as those without a gradient.
        """
        how = []
        for name, moment in self._moments.items():
            use = _C.MomentUse.nothing
            if name not in idle and moment.parameter.grad is not None:
                moment.start()
                moment.complete()
                use = _C.MomentUse.step
            how.append((use, moment.decay, moment.eps))
        at = 0 if sums is None else sums.data_ptr()
        self.call(self._table().native.commit, at, how, ranks)

    def refresh(self) -> None:
        """Compute the factors of second moments that were loaded, after `begin`."""
        moments = self._moments.values()
        if not any(moment.is_stale for moment in moments):
            return
        how = [(_C.MomentUse.nothing, 0.0, moment.eps) for moment in moments]
        self.call(self._table().native.commit, 0, how, 1)
        for moment in moments:
            moment.is_stale = False

    def move(self, moments: Sequence[CodedMoment], lr: float, weight_decay: float) -> None:
        """Move parameters of a group by their momenta, which are their gradients."""
        table = self._table()
        steps: dict[torch.dtype, list[tuple[Any, ...]]] = {}
        alive = []  # until the kernels are queued
        strided = []
        for moment in moments:
            state, parameter = moment.state, local(moment.parameter.detach())
            assert moment.parameter.grad is not None
            state["step"].add_(1)
            gradient = local(moment.parameter.grad).to(parameter.dtype).contiguous()
            values = parameter.contiguous()
            alive += [gradient, values]
            if values is not parameter:  # in another memory format
                strided.append((parameter, values))
            steps.setdefault(parameter.dtype, []).append(
                (
                    *(table.numbers[id(moment)], values.data_ptr(), gradient.data_ptr()),
                    *(*moment.advance(lr, weight_decay), moment.kept),
                    *(moment.divides, moment.landed),
                )
            )
        for dtype, each in steps.items():
            self.call(table.native.move, each, DTYPES[dtype])
        for parameter, values in strided:
            parameter.copy_(values)
        written([moment.parameter for moment in moments])

    def _table(self) -> Table:
        """Return the table of all moments of the state."""
        table = self._all
        if table is None or len(table.parts) != len(self._moments) or not table.is_current:
            parts = [(moment, None) for moment in self._moments.values()]
            table = self._all = Table(self.kernels, parts)
        return table


@dataclass(eq=False)
class Job:
    """The passes over a bucket in one step: `encode`, `sent` if something is kept, `land`.

    Attributes:
        passes: the passes.
        table: the matrices; what was sent is kept if it says where.
        values: the bucket, contiguous.
        unit: the loss scale.
        ranks: number of ranks that average their momenta.
        looks: this step's second moments travel.
        divides: what is coded is divided by the roots of the second moments.
        room: function that returns memory for a copy of what is coded, for `sent`, where the
            exchange overwrites the values; None: it does not.
        copy: that memory. It lives as long as this: another stream may be yet to read it.
        encoded: `encode` was called.
        befores: copies of residuals that the coding overwrites; see
            `BucketReducer.residuals_before`.
    """

    passes: Passes
    table: Table
    values: torch.Tensor
    unit: float
    ranks: int
    looks: bool
    divides: bool
    room: Callable[[torch.Tensor], torch.Tensor] | None = None
    copy: torch.Tensor | None = None
    encoded: bool = False
    befores: Sequence[torch.Tensor | None] = ()
    _swapped: int = 0
    _sides: list[int] = field(default_factory=list)

    def encode(
        self,
        swapped: torch.Tensor | None = None,
        scale: Callable[[Sequence[CodedMoment]], None] | None = None,
    ) -> None:
        """Replace gradients by what is coded.

        Args:
            swapped: see `SideStream`; None: residuals are where the host believes them to be.
            scale: function that gives moments without second moments the scale of their first
                coding; None: all have them.
        """
        self.encoded = True
        values, native, parts = self.values, self.table.native, self.table.parts
        own, shards = self.table.own, self.table.shards
        turns: list[tuple[Any, ...]] = []
        new = []
        for i, (moment, piece) in enumerate(parts):
            if self.ranks > 1 and piece and moment.codec is not piece.codec:
                moment.use(piece.codec)
            if not moment.knows:
                new.append(moment)
            moment.entered = True
            signs, first, stride = moment.turn
            side = piece.residual.side if piece and piece.residual else 0
            # Of shards of other ranks the momentum is unknown.
            goes_on = own is not None and (own[i].last_step or shards > 1)
            read = own[i].side if own is not None and goes_on else -1
            turn = (
                *(signs if self.looks else 0, first, stride),
                *(*moment.by, read, side, not moment.knows),
            )
            turns += [turn] * shards
            self._sides += [side] * shards
        if self.room is not None:
            self.copy = self.room(values)
        scratch = values.new_empty(native.scratch_floats, dtype=torch.float32)
        self._swapped = 0 if swapped is None else swapped.data_ptr()
        bound = parts[0][0].bound(self.ranks)
        bucket = (
            *(values.data_ptr(), DTYPES[values.dtype], 1 / self.unit, bound, self.ranks),
            *(0 if self.copy is None else self.copy.data_ptr(), self.divides),
            *(scratch.data_ptr(), self._swapped),
        )
        if new and scale is not None:
            self.passes.call(native.code, bucket, turns, False)
            scale(new)
        self.passes.call(native.code, bucket, turns, True)

    def sent(self) -> None:
        """Store what this rank has sent, of values that are coded and not yet averaged."""
        own, shards = self.table.own, self.table.shards
        assert own is not None
        befores = self.befores or [None] * len(self._sides)
        sendings = []
        for i, (before, side) in enumerate(zip(befores, self._sides, strict=True)):
            at = 0 if before is None else before.data_ptr()
            _, kept = self.table.parts[i // shards][0].by
            sendings.append((at, side, 1 - own[i // shards].side, kept))
        coded = self.values if self.copy is None else self.copy
        self.passes.call(
            *(self.table.native.sent, coded.data_ptr(), DTYPES[coded.dtype], sendings),
            *(self.divides, self._swapped),
        )

    def land(self, result: torch.Tensor | None = None) -> None:
        """Make the ranks' mean a momentum.

        Args:
            result: of a reduce-scatter, this rank's own shards; None: it is in the bucket.
        """
        mean = self.values if result is None else result
        self.passes.call(
            *(self.table.landed.land, mean.data_ptr(), DTYPES[mean.dtype]),
            *(self.unit, self.divides),
        )
        for moment, _ in self.table.parts:
            moment.landed = True
