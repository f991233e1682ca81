"""Kernels of coded moments, compiled by g++: the bits of the passes on the CPU, over some steps."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pycomm.feedback import Feedback, Residual, storage  # noqa: E402
from pycomm.momentum import plain  # noqa: E402
from pycomm.momentum.kernels import Kernels  # noqa: E402
from pycomm.momentum.passes import DTYPES  # noqa: E402
from tests.codecs.cuda import emulated  # noqa: E402
from tests.torch.optim.followed import SHAPES, ByPasses, differing  # noqa: E402


def launch(launches: Any, device: torch.device) -> None:
    emulated.run(launches, emulated.all_kernels())


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
        made = plain.Encoding(torch.zeros(shape), g.to(dtype), copy=own)
        if i % 2:
            made.beta, made.unit, made.momentum = 0.75, 10.0, m.to(dtype)
            made.residual, made.errors = residual.stored_worker(), errors[i]
        if i % 3:
            made.parameter, made.decay = x.to(dtype), 0.1
        encodings.append(made)
        sides = (residual.stored_worker(), residual.fresh_worker()) if i % 2 else (None, None)
        stores.append(plain.Sent(own, *sides, own.view(-1)))
        kept = torch.zeros(shape, dtype=dtype) if i % 2 else None
        moves.append(plain.Move(x.to(dtype), made.values, kept, 0.1))
    plain.encode(encodings)
    plain.store_sent(stores)
    plain.move(moves)
    kept = [one.momentum for one in moves if one.momentum is not None]
    written = [one.parameter for one in moves]
    return [e.values for e in encodings], [s.to for s in stores], kept, written, [errors[:, :2]]


@pytest.mark.parametrize("form", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("times", "launches"), [(1, 3), (5, 4)])  # 31 matrices to an encode
@torch.no_grad()
def test_kernels_without_factors_have_those_bits(monkeypatch, form, dtype, times, launches):
    want = plain_passes(form, dtype, times)
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
@pytest.mark.parametrize(("shards", "scatters"), [(1, True), (3, True), (3, False)])
@torch.no_grad()
def test_kernels_have_the_bits_of_the_cpu(form, dtype, shards, scatters):
    ways = Kernels(torch.device("cpu"), launch), Kernels(torch.device("cpu"))
    assert not differing(*(ByPasses(way, form, dtype, shards, scatters) for way in ways))
