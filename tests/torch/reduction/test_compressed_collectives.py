"""Compressed collectives on any backend give the bits of those in C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import backend
from pycomm.feedback import Feedback, Residuals
from pycomm.policy import Decision, Parameter
from pycomm.reduction import two_shot
from pycomm.reduction.bucket import Bucket
from tests.extent import each_pair, each_value
from tests.torch.harness import same_bits
from tests.torch.pool import on_ranks

STOCHASTIC = "quant:bits=4,block=64,rounding=stochastic"
SIZES = [1000, 1, 4099, 0, 20011, 300]
SEED, STEPS = 0x1234567890ABCDEF, 3
MIXES = {
    "recode": ["int8", "fp32", STOCHASTIC, "int4", "fp8", "bf16"],
    "gather": [
        "topk:density=0.05",
        "fp32",
        "int4",
        "int8",
        "topk:indices=int12,values=int8",
        "bf16",
    ],
    "variable": ["lossless", "int8", "lossless:dtype=bfloat16", "lossless", "lossless", "fp32"],
    "exact": ["fp32"] * 6,
}


def decisions(mix: str) -> list[Decision]:
    return [
        Decision(Parameter(f"p{i}", (numel,), torch.float32), pycomm.codec(codec), "test")
        for i, (codec, numel) in enumerate(zip(MIXES[mix], SIZES, strict=True))
    ]


class Side:
    """One of the two implementations, with a bucket and feedback of its own."""

    def __init__(self, mix: str, ranks: int, rows: int = 1) -> None:
        self.feedback = Residuals(Feedback(), ranks)
        decided = decisions(mix)
        cpu = torch.device("cpu")
        self.bucket = Bucket(decided, range(len(decided)), self.feedback, cpu, rows=rows)

    def step(self, step: int) -> dict[str, Any]:
        return {"seed": SEED, "step": step}

    def commit(self) -> None:
        self.feedback.commit([piece.name for piece in self.bucket.pieces])

    def residuals(self) -> list[torch.Tensor]:
        owed = [p.residual for p in self.bucket.pieces if p.residual is not None]
        return [r.current(role) for r in owed for role, _ in r.pairs()]


def compare(
    rank: int, ranks: int, mix: str, op: str, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Run some steps in C++ and on Gloo; return digests of the results, for ranks to compare."""
    gloo = dist.new_group(backend="gloo")
    native = backend.find()
    assert native is not None
    rows = ranks if op == "reduce_scatter" else 1
    ours, theirs = Side(mix, ranks, rows), Side(mix, ranks, rows)
    numel = ours.bucket.numel
    generator = torch.Generator().manual_seed(rank)
    digests = []
    for step in range(STEPS):
        x = torch.randn(rows, numel, generator=generator).to(dtype)
        layout = ours.bucket.native
        if op == "all_reduce":
            a, b = x[0].clone(), x[0].clone()
            work = native.compressed_all_reduce(a, layout, ours.bucket.sides, **ours.step(step))
            finite = two_shot.all_reduce(b, theirs.bucket, gloo, **theirs.step(step))
        elif op == "reduce_scatter":
            a, b = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            work = native.compressed_reduce_scatter(
                a, x, layout, ours.bucket.sides, **ours.step(step)
            )
            finite = two_shot.reduce_scatter(b, x, theirs.bucket, gloo, **theirs.step(step))
        else:
            a, b = torch.empty(2, ranks, numel, dtype=dtype)
            work = native.compressed_all_gather(
                a, x[0], layout, ours.bucket.sides, **ours.step(step)
            )
            finite = two_shot.all_gather(b, x[0], theirs.bucket, gloo, **theirs.step(step))
        work.wait()
        assert work.finite
        assert finite
        assert same_bits(a, b), f"step {step}"
        ours.commit()
        theirs.commit()
        for mine, other in zip(ours.residuals(), theirs.residuals(), strict=True):
            assert same_bits(mine, other), f"residuals of step {step}"
        digests.append(str(a.double().sum().item()))
    dist.destroy_process_group(gloo)
    return digests if op != "reduce_scatter" else []


@each_pair
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_backend_gives_the_bits_of_cpp(pool, ranks, mix, op):
    outcomes = pool.run(compare, mix, op, ranks=ranks)
    assert all(outcome == outcomes[0] for outcome in outcomes)


@each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("mix", ["recode", "gather"])
def test_small_floats_likewise(pool, mix, op, dtype):
    pool.run(compare, mix, op, dtype, ranks=2)


def small_floats(rank: int, ranks: int, dtype: torch.dtype, backend_name: str) -> None:
    """Results equal those of float32 throughout, rounded at the end."""
    side, wide = Side("recode", ranks), Side("recode", ranks)
    for step in range(STEPS):
        x = torch.randn(side.bucket.numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        want = x.float()
        group = dist.group.WORLD
        assert two_shot.all_reduce(want, wide.bucket, group, **wide.step(step))
        if backend_name == "pycomm":
            backend.find().compressed_all_reduce(
                x, side.bucket.native, side.bucket.sides, **side.step(step)
            ).wait()
        else:
            assert two_shot.all_reduce(x, side.bucket, group, **side.step(step))
        assert same_bits(x, want.to(dtype))
        side.commit()
        wide.commit()


@pytest.mark.parametrize("name", ["pycomm", "gloo"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_rounded_once(pool, dtype, name):
    pool.run(small_floats, dtype, name, backend=name)


@on_ranks(2)
def test_16_bit_floats_and_wrong_arguments(rank, ranks):
    side = Side("exact", ranks, rows=ranks)
    native, numel = backend.find(), side.bucket.numel
    x = torch.full((ranks, numel), float(rank + 1), dtype=torch.bfloat16)
    out = torch.empty(numel, dtype=torch.bfloat16)
    work = native.compressed_reduce_scatter(
        out, x, side.bucket.native, side.bucket.sides, **side.step(0)
    )
    assert work.get_future().wait() is out
    assert out.eq((ranks + 1) / 2).all()
    out.zero_()
    native.compressed_reduce_scatter(
        out, x.float(), side.bucket.native, side.bucket.sides, **side.step(0)
    ).wait()
    assert out.eq((ranks + 1) / 2).all()  # the result of a wider input is narrowed
    for wrong in (out[1:], out.double()):
        with pytest.raises(RuntimeError, match=r"values|takes"):
            native.compressed_reduce_scatter(
                wrong, x, side.bucket.native, side.bucket.sides, **side.step(0)
            )
    with pytest.raises(RuntimeError, match="one row"):
        native.compressed_all_gather(x, out, side.bucket.native, side.bucket.sides, **side.step(0))
    one_row = Side("exact", ranks).bucket.native
    with pytest.raises(RuntimeError, match=f"Layout\\({ranks}\\)"):
        native.compressed_reduce_scatter(out, x, one_row, side.bucket.sides, **side.step(0))


def overflow(rank: int, ranks: int, backend_name: str) -> tuple[bool, bool]:
    side = Side("recode", ranks, rows=ranks)
    numel = side.bucket.numel
    x, out = torch.ones(ranks, numel), torch.empty(numel)
    if rank == 0:
        x[1, 5] = float("inf")
    if backend_name == "pycomm":
        work = backend.find().compressed_reduce_scatter(
            out, x, side.bucket.native, side.bucket.sides, **side.step(0)
        )
        work.wait()
        return work.finite, bool(out.isfinite().all())
    group = dist.group.WORLD
    finite = two_shot.reduce_scatter(out, x, side.bucket, group, **side.step(0))
    return bool(finite), bool(out.isfinite().all())


@pytest.mark.parametrize("name", ["pycomm", "gloo"])
def test_every_rank_knows_of_an_overflow(pool, name):
    assert pool.run(overflow, name, backend=name) == [(False, True), (False, False)]
