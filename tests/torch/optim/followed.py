"""Steps of coded moments whose tensors can be compared: by the passes, and by their definition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

import pycomm
from pycomm.feedback import Feedback, Residual, storage
from pycomm.momentum.moment import CodedMoment, SGDMoment
from pycomm.momentum.passes import Job, Kernels, Passes, Table
from pycomm.reduction.bucket import BucketPiece
from tests.torch.optim.plain_moment import PlainMoment

SHAPES = [(1, 1), (3, 5), (64, 16), (65, 33), (7, 600), (300, 31), (129, 515)]
RANKS, STEPS = 3, 9
GROUPS = {"adamw": {"betas": (0.9, 0.95), "eps": 1e-8}, "sgd": {"momentum": 0.9}}
KINDS = {"adamw": CodedMoment, "sgd": SGDMoment}
# Steps in which nothing is divided, sums do not travel, gradients are far above the bound, they are
# clipped after the backward, and sums are not finite.
WHOLE, ALONE, HUGE, CLIPPED, WRONG = 1, (2, 3, 6), 4, 5, 6
CHANGED = 5  # from which step on the momentum is another one
OWN = 1  # the shard of this rank


class Followed(ABC):
    """Matrices of a bucket, and all that a step reads and writes.

    Args:
        form: of the stored residuals.
        dtype: of gradients and parameters.
        shards: number of shards; 1: the rank has whole parameters.
        scatters: the rank codes all shards; else its own.
        kind: the optimizer, whose schedule changes a momentum of SGD.
    """

    def __init__(
        self,
        form: str,
        dtype: torch.dtype,
        shards: int = 1,
        scatters: bool = True,
        kind: str = "adamw",
    ) -> None:
        torch.manual_seed(1)
        self.kind, self.group = kind, dict(GROUPS[kind])
        self.dtype, self.shards = dtype, shards
        self.shard = OWN if shards > 1 else 0
        self.coded_here = range(shards) if scatters else [self.shard]
        self.codec, rule = pycomm.codec("sign"), Feedback("residual", storage=form)
        self.given = [torch.randn(shape).to(dtype) for shape in SHAPES]
        self.padded = [-(-rows // shards) for rows, _ in SHAPES]
        sizes = [rows * columns for rows, (_, columns) in zip(self.padded, SHAPES, strict=True)]
        self.sizes = sizes
        self.kept = [
            tuple(Residual(rule, n, torch.device("cpu"), rows=len(self.coded_here)) for _ in "eo")
            for n in sizes
        ]
        self.coded: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []

    def own(self, i: int) -> torch.Tensor:
        """The rows of a parameter that this rank has."""
        begin = self.shard * self.padded[i]
        return self.given[i][begin : begin + self.padded[i]]

    @abstractmethod
    def moments(self) -> list[torch.Tensor]:
        """Return the tensors of the moments."""

    def state(self) -> list[torch.Tensor]:
        """Return all that is to have the same bits."""
        found = [*self.moments()]
        found += [t for e, o in self.kept for pair in (e.worker, o.worker) for t in pair]
        return [t.clone() for t in [*found, *self.coded, *self.sums]]

    # ------------------------------------------------------------------ a step

    def take(self, step: int) -> None:
        """Take a step, of which other ranks have the same numbers."""
        if self.kind == "sgd" and step == CHANGED:
            self.group["momentum"] = 0.6
        unit = 1.0 if self.dtype == torch.float16 or step in (WHOLE, *ALONE) else 4.0
        looks, divides = step not in ALONE, self.kind != "sgd" and step != WHOLE
        generator = torch.Generator().manual_seed(step)
        scale = {HUGE: 500.0, WRONG: 1e30 if self.dtype != torch.float16 else 1.0}.get(step, 1.0)
        shape = len(self.coded_here), sum(self.sizes)
        bucket = (scale * torch.randn(shape, generator=generator)).to(self.dtype) * unit
        for i, (rows, columns) in enumerate(SHAPES):  # padding has no gradient
            for place, shard in enumerate(self.coded_here):
                real = min(max(rows - shard * self.padded[i], 0), self.padded[i]) * columns
                self.part(bucket, i)[place, real:] = 0
        mean = self.backward(bucket, step, unit, looks=looks, divides=divides)
        gradients = []
        for i in range(len(SHAPES)):
            own = self.part(mean[None], i)[0][: self.own(i).numel()].view_as(self.own(i)) / unit
            gradients.append(own * 0.25 if step == CLIPPED and i % 2 else own)
        for pair in self.kept:
            for residual in pair:
                residual.commit(step + 1)
        self.finish(gradients, travels=looks or step == WRONG)

    def part(self, bucket: torch.Tensor, i: int) -> torch.Tensor:
        """The values of a matrix in a bucket [shards, values]."""
        return bucket[:, sum(self.sizes[:i]) : sum(self.sizes[: i + 1])]

    def code(self, bucket: torch.Tensor) -> torch.Tensor:
        """Write residuals, of values that are coded by halving them; return the ranks' mean."""
        self.coded = [bucket.clone()]
        for i, (e, _) in enumerate(self.kept):
            for place, part in enumerate(self.part(bucket, i)):
                p = part.float() + storage.load(e.stored_worker(place), e.numel)
                fresh = e.stored("worker", e.sides[1], place, 0, e.numel)
                storage.store(p - (p / 2).to(part.dtype).float(), fresh)
        return bucket[self.shard if len(bucket) > 1 else 0] / 2

    @abstractmethod
    def backward(
        self, bucket: torch.Tensor, step: int, unit: float, *, looks: bool, divides: bool
    ) -> torch.Tensor:
        """Make momenta of the gradients of one rank; return those of the own shards."""

    @abstractmethod
    def finish(self, gradients: Sequence[torch.Tensor], *, travels: bool) -> None:
        """Exchange second moments with ranks that have the same, and move the parameters."""


class ByPasses(Followed):
    """By csrc/optim; arguments as for `Followed`.

    Args:
        kernels: what runs the passes.
    """

    def __init__(self, kernels: Kernels, *args: Any) -> None:
        super().__init__(*args)
        moments: dict[str, CodedMoment] = {}
        self.passes = Passes(kernels, moments)
        for i in range(len(SHAPES)):
            whole = torch.nn.Parameter(self.given[i])
            where = {"shard": self.shard, "shards": self.shards}
            moment = KINDS[self.kind](whole, self.group, {}, self.codec, **where)
            moment.parameter = torch.nn.Parameter(self.own(i).clone())
            moments[str(i)] = moment
        self.all = list(moments.values())

    def moments(self) -> list[torch.Tensor]:
        keys = (self.all[0].key, "row", "column", "heard", "moment_weight", "coding_error")
        keys += ("mean_energy", "own_energy")
        return [
            *(moment.parameter.detach() for moment in self.all),
            *(moment.state[key] for key in keys for moment in self.all),
        ]

    def backward(
        self, bucket: torch.Tensor, step: int, unit: float, *, looks: bool, divides: bool
    ) -> torch.Tensor:
        for moment in self.all:
            moment.begin()
        self.passes.refresh()
        pieces = [
            (moment, BucketPiece("", sum(self.sizes[:i]), n, moment.codec, 0, self.kept[i][0]))
            for i, (moment, n) in enumerate(zip(self.all, self.sizes, strict=True))
        ]
        own, (shards, numel) = [o for _, o in self.kept], bucket.shape
        table = Table(self.passes.kernels, pieces, own, shards, numel)
        room = torch.empty_like if step % 2 else None
        how = {"looks": looks, "divides": divides, "room": room}
        job = Job(self.passes, table, bucket, unit=unit, ranks=RANKS, **how)
        before = [e.stored_worker().clone() for e, _ in self.kept] if shards == 1 else ()
        job.encode(scale=lambda new: self.passes.scale(new, self._summed))
        mean = self.code(bucket)
        if step == ALONE[0] and before:
            job.befores = before
        if room is not None:
            bucket.fill_(float("nan"))
        job.sent()
        job.land(mean)
        return mean

    def _summed(self, sums: torch.Tensor) -> int:
        sums.mul_(RANKS)
        return RANKS

    def finish(self, gradients: Sequence[torch.Tensor], *, travels: bool) -> None:
        for moment, gradient in zip(self.all, gradients, strict=True):
            moment.parameter.grad = gradient.clone()
        sums = self.passes.room_for_sums()
        self.passes.collect(sums)
        self.sums = [sums.clone()]
        self.passes.commit(RANKS * sums if travels else None, RANKS)
        self.passes.move(self.all, 0.1, 0.01)


class ByDefinition(Followed):
    """In plain torch; arguments as for `Followed`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        error = pycomm.policy.quality.nominal_error(self.codec) ** 2
        where = {"shard": self.shard, "shards": self.shards, "ranks": RANKS}
        self.all = [
            PlainMoment(self.own(i), rows, self.group, error, **where)
            for i, (rows, _) in enumerate(SHAPES)
        ]

    def moments(self) -> list[torch.Tensor]:
        return [t for each in zip(*(m.state() for m in self.all), strict=True) for t in each]

    def backward(
        self, bucket: torch.Tensor, step: int, unit: float, *, looks: bool, divides: bool
    ) -> torch.Tensor:
        shards = []
        for i, moment in enumerate(self.all):
            moment.begin()
            parts = self.part(bucket, i).view(-1, self.padded[i], moment.columns)
            shards.append(dict(zip(self.coded_here, parts, strict=True)))
            by = 1 / unit
            counts = moment.look(shards[i], by, looks)
            if moment.scale is None and not moment.is_sgd:
                moment.provide(moment.local_sums() * RANKS / RANKS)
            e, o = self.kept[i]
            places = {shard: place for place, shard in enumerate(self.coded_here)}
            goes_on = o.last_step or len(places) > 1
            went = {s: o.stored_worker(at) if goes_on else moment.m for s, at in places.items()}
            stored = {s: e.stored_worker(at) for s, at in places.items()}
            how = {"unit": by, "looks": looks, "divides": divides}
            moment.encode(shards[i], counts, went, stored, **how)
        mean = self.code(bucket)
        for i, (moment, (e, o)) in enumerate(zip(self.all, self.kept, strict=True)):
            for place, (shard, values) in enumerate(shards[i].items()):
                residuals = (e.stored("worker", side, place, 0, e.numel) for side in e.sides)
                sent = moment.sent(values, *residuals, shard, divides=divides)
                storage.store(sent.reshape(-1), o.stored("worker", o.sides[1], place, 0, o.numel))
            own = self.part(mean[None], i).view(self.padded[i], moment.columns)
            moment.land(own, unit, divides)
        return mean

    def finish(self, gradients: Sequence[torch.Tensor], *, travels: bool) -> None:
        self.sums = [torch.cat([moment.local_sums() for moment in self.all])]
        for moment, gradient in zip(self.all, gradients, strict=True):
            moment.commit(moment.local_sums() * RANKS if travels else None)
            moment.move(gradient, 0.1, 0.01)


def differing(ours: Followed, theirs: Followed, steps: int = STEPS) -> list[Any]:
    """Take steps; return the first tensors that differ, with the step and their number."""
    for step in range(steps):
        ours.take(step)
        theirs.take(step)
        for i, (a, b) in enumerate(zip(ours.state(), theirs.state(), strict=True)):
            same = (a == b) | (a.isnan() & b.isnan())
            if not same.all():
                return [step, i, a[~same], b[~same]]
    return []
