"""Kernels of coded moments, compiled by g++: the bits of the passes on the CPU, over some steps."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pycomm  # noqa: E402
from pycomm.feedback import Feedback, Residual, storage  # noqa: E402
from pycomm.momentum import scaled  # noqa: E402
from pycomm.momentum.moment import CodedMoment  # noqa: E402
from pycomm.momentum.on_device.job import Job  # noqa: E402
from pycomm.momentum.on_device.kernels import Kernels  # noqa: E402
from pycomm.momentum.on_device.moment import DeviceMoment  # noqa: E402
from pycomm.momentum.on_device.passes import DTYPES, DevicePasses  # noqa: E402
from pycomm.momentum.on_device.table import Table  # noqa: E402
from pycomm.momentum.sum_places import SumPlaces  # noqa: E402
from pycomm.reduction.bucket import BucketPiece  # noqa: E402
from tests.codecs.cuda import emulated  # noqa: E402

SHAPES = [(1, 1), (3, 5), (64, 16), (65, 33), (7, 600), (300, 31), (129, 515)]
RANKS, STEPS = 3, 9
GROUP = {"betas": (0.9, 0.95), "eps": 1e-8}
# Steps in which nothing is divided, sums do not travel, gradients are far above the bound, they are
# clipped after the backward, and sums are not finite.
WHOLE, ALONE, HUGE, CLIPPED, WRONG = 1, (2, 3, 6), 4, 5, 6


def launch(launches: Any, device: torch.device) -> None:
    emulated.run(launches, emulated.all_kernels())


class Followed:
    """Matrices of a bucket, and all that a step reads and writes.

    Args:
        kind: of the moments.
        form: of the stored residuals.
        dtype: of gradients and parameters.
    """

    def __init__(self, kind: type[CodedMoment], form: str, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        rule, codec = Feedback("residual", storage=form), pycomm.codec("sign")
        self.moments, self.kept = [], []
        for rows, columns in SHAPES:
            parameter = torch.nn.Parameter(torch.randn(rows, columns).to(dtype))
            self.moments.append(kind(parameter, GROUP, {}, codec, ranks=RANKS))
            sides = (Residual(rule, rows * columns, parameter.device) for _ in "eo")
            self.kept.append(tuple(sides))
        self.coded: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []

    def state(self) -> list[torch.Tensor]:
        """Return all that is to have the same bits."""
        found = [moment.parameter.detach() for moment in self.moments]
        found += [v.clone() for m in self.moments for v in m.state.values()]
        found += [t for e, o in self.kept for pair in (e.worker, o.worker) for t in pair]
        return [t.clone() for t in [*found, *self.coded, *self.sums]]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = {HUGE: 500.0, WRONG: 1e30 if dtype != torch.float16 else 1.0}.get(step, 1.0)
    return [
        (scale * torch.randn(rows * columns, generator=generator)).to(dtype)
        for rows, columns in SHAPES
    ]


def summed(sums: torch.Tensor) -> int:
    """Add the sums up over ranks that have the same."""
    sums.mul_(RANKS)
    return RANKS


def backward(all_: Followed, step: int, dtype: torch.dtype, unit: float, passes: Any) -> None:
    """Make momenta of the gradients of one rank, which are coded by halving them."""
    given = gradients(step, dtype)
    bucket = torch.cat(given) * unit
    parts = torch.split(bucket, [g.numel() for g in given])
    looks, divides = step not in ALONE, step != WHOLE
    if passes is not None:
        pieces, offset = [], 0
        for g, moment, (e, _) in zip(given, all_.moments, all_.kept, strict=True):
            pieces.append((moment, BucketPiece("", offset, g.numel(), moment.codec, 0, e)))
            offset += g.numel()
        table = Table(pieces, [o for _, o in all_.kept])
        how = {"looks": looks, "divides": divides, "copies": step % 2 == 1}
        job = Job(passes, table, bucket, unit=unit, ranks=RANKS, **how)
        job.encode(scale=lambda new: passes.scale(new, summed))
        all_.coded = [bucket.clone()]
        job.befores = code(all_, parts, befores=step == ALONE[0])
        job.sent()
        bucket.div_(2)  # the ranks' mean
        job.land()
    else:
        new = [moment for moment in all_.moments if not moment.has_scale]
        for moment, part in zip(all_.moments, parts, strict=True):
            if moment in new:
                moment.enter(part, unit)
                moment.provide(moment.local_sums().mul_(RANKS).div_(RANKS))
        encodings = [
            moment.encoding(
                *(part, unit, e),
                o.stored_worker() if o.last_step else None,
                entered=moment in new,
                looks=looks,
                divides=divides,
            )
            for moment, part, (e, o) in zip(all_.moments, parts, all_.kept, strict=True)
        ]
        scaled.encode(encodings)
        all_.coded = [bucket.clone()]
        befores = code(all_, parts, befores=step == ALONE[0])
        scaled.store_sent(
            [
                moment.sent(part, e, o, None, before)
                for moment, part, (e, o), before in zip(
                    all_.moments, parts, all_.kept, befores, strict=True
                )
            ]
        )
        bucket.div_(2)
        landings = [
            moment.landing(part, divides=divides)
            for moment, part in zip(all_.moments, parts, strict=True)
        ]
        probes = scaled.land(landings, unit)
        for moment, probe in zip(all_.moments, probes, strict=True):
            moment.land(probe)
    for i, (moment, part) in enumerate(zip(all_.moments, parts, strict=True)):
        moment.parameter.grad = part.view_as(moment.parameter) / unit
        if step == CLIPPED and i % 2:
            moment.parameter.grad *= 0.25


def code(all_: Followed, parts: Any, *, befores: bool) -> list[torch.Tensor | None]:
    """Write residuals; return those before the coding, if a copy of them is to be used."""
    found = []
    for part, (e, _) in zip(parts, all_.kept, strict=True):
        p = part.float() + storage.load(e.stored_worker(), e.numel)
        storage.store(p - (p / 2).to(part.dtype).float(), e.fresh_worker())
        found.append(e.stored_worker().clone() if befores else None)
    return found


def take(all_: Followed, step: int, dtype: torch.dtype, unit: float, passes: Any) -> None:
    """Take a step."""
    for moment in all_.moments:
        moment.begin()
    if passes is not None:
        passes.refresh(all_.moments)
    backward(all_, step, dtype, unit, passes)
    for pair in all_.kept:
        for residual in pair:
            residual.commit(step + 1)
    finish(all_, step, passes)


def finish(all_: Followed, step: int, passes: Any) -> None:
    """Exchange second moments with ranks that have the same, and move the parameters."""
    looks = step not in ALONE or step == WRONG
    if passes is not None:
        sums = passes.sums_of(all_.moments)
        passes.collect(all_.moments, sums)
        all_.sums = [sums.clone()]
        passes.commit(all_.moments, RANKS * sums if looks else None, RANKS, lambda one: True)
        passes.move(all_.moments, all_.moments, 0.1, 0.01)
        return
    sizes = [moment.sums_numel for moment in all_.moments]
    sums = torch.cat([moment.local_sums() for moment in all_.moments])
    places = SumPlaces(sizes, sums.device)
    places.measure(sums)
    all_.sums = [sums.clone()]
    sums = sums.mul(RANKS).div_(RANKS)
    places.condense(sums)
    received, numbers = places.split(sums)
    waiting = [
        moment
        for moment, part, of_part in zip(all_.moments, received, numbers, strict=True)
        if moment.commit(part if looks and of_part[-1] else None, of_part, used=True)
    ]
    CodedMoment.wait(waiting)
    CodedMoment.move(all_.moments, 0.1, 0.01)


def plain_passes(form: str, dtype: torch.dtype, times: int) -> tuple[list[torch.Tensor], ...]:
    """Do the passes of an optimizer that divides by nothing; return what they have written."""
    shapes = SHAPES * times
    rule = Feedback("residual", storage=form)
    generator = torch.Generator().manual_seed(1)
    encodings, stores, moves, errors = [], [], [], torch.zeros(len(shapes), 3)
    for i, shape in enumerate(shapes):
        g, x, m = (torch.randn(shape, generator=generator) for _ in "gxm")
        residual = Residual(rule, g.numel(), g.device)
        for side, values in zip(residual.worker or (), (x, m), strict=True):
            storage.store(values.view(-1), side)
        own = torch.zeros(shape)
        made = scaled.Encoding(torch.zeros(shape), shape[0], gradient=g.to(dtype), copy=own)
        if i % 2:
            made.beta, made.unit, made.momentum, made.known = 0.75, 10.0, m.to(dtype), shape[0]
            made.residual, made.errors = residual.stored_worker(), errors[i]
        if i % 3:
            made.parameter, made.decay = x.to(dtype), 0.1
        encodings.append(made)
        sides = (residual.stored_worker(), residual.fresh_worker()) if i % 2 else (None, None)
        stores.append(scaled.Sent(own, None, None, *sides, own.view(-1)))
        moves.append(
            scaled.Move(
                *(x.to(dtype), made.values, torch.zeros(shape, dtype=dtype) if i % 2 else None),
                *(None, None, 0.1, 1.0, 0.0),
            )
        )
    scaled.encode(encodings)
    scaled.store_sent(stores)
    scaled.move(moves)
    kept = [one.momentum for one in moves if one.momentum is not None]
    written = [one.parameter for one in moves]
    return [e.values for e in encodings], [s.to for s in stores], kept, written, [errors[:, :2]]


@pytest.mark.parametrize("form", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("times", "launches"), [(1, 3), (5, 4)])  # 31 matrices to an encode
@torch.no_grad()
def test_kernels_without_factors_have_those_bits(monkeypatch, form, dtype, times, launches):
    want = plain_passes(form, dtype, times)
    monkeypatch.setattr(scaled, "native", lambda *_: False)
    monkeypatch.setattr(scaled, "_on_device", lambda *_: True)
    launched: list[str] = []

    def noted(launches: Any, device: torch.device) -> None:
        launched.extend(each.kernel for each in launches)
        launch(launches, device)

    found = Kernels(torch.device("cpu"), noted)
    monkeypatch.setattr(Kernels, "find", staticmethod(lambda *_: found))
    got = plain_passes(form, dtype, times)
    assert len(launched) == launches
    for ours, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("form", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_kernels_have_the_bits_of_the_cpu(form, dtype):
    ours, theirs = (Followed(kind, form, dtype) for kind in (DeviceMoment, CodedMoment))
    passes = DevicePasses(Kernels(torch.device("cpu"), launch))
    for step in range(STEPS):
        unit = 1.0 if dtype == torch.float16 or step in (WHOLE, *ALONE) else 4.0
        take(ours, step, dtype, unit, passes)
        take(theirs, step, dtype, unit, None)
        for i, (a, b) in enumerate(zip(ours.state(), theirs.state(), strict=True)):
            same = (a == b) | (a.isnan() & b.isnan())
            assert same.all(), (step, i, a[~same], b[~same])
