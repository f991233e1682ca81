"""All schedules of coded collectives have the same bits, residuals and payloads.

They run in the core of pycomm's backend, in C++ with payloads of the caller's group, and in Python.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pycomm import backend
from pycomm.errors import Error, WireMismatch
from pycomm.feedback import Feedback, Residuals, storage
from pycomm.reduction import paths, payloads, two_shot
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import Coder, ExchangePlan, Run, whole
from pycomm.reduction.payloads import Payloads
from pycomm.reduction.two_shot import Batched
from tests.extent import pairs
from tests.torch.harness import bucket_of, same_bits
from tests.torch.pool import PATIENT, on_ranks

SIZES = [0, 1000, 1, 4099, 0, 77, 20011, 300, 3, 129]
STEPS = 3
MIXES = {
    "recode": ["int8", "fp32", "quant:bits=4,block=64,rounding=stochastic", "int4", "fp8", "bf16"],
    "gather": ["topk:density=0.05", "fp32", "int4", "int8", "topk:indices=int12,values=int8"],
    "rotated": ["eden:bits=1", "eden:bits=4", "mxfp4", "sign", "quant:bits=4,rounding=stochastic"],
    "variable": ["lossless", "int8", "lossless:dtype=bfloat16", "fp32"],
    "exact": ["fp32"],
}
KINDS = ["residual:", "decay:0.9,", "momentum:0.8,"]
FEEDBACK = [None, *(f"{kind}storage={form}" for kind in KINDS for form in storage.DTYPES)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPS = ["all_reduce", "reduce_scatter"]


WAYS = ["core", "batched", "runs"]


class Side:
    """A bucket with feedback of its own, reduced in one of these ways."""

    def __init__(self, mix: str, rule: str | None, op: str, way: str) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        feedback = Feedback.of(rule)
        self.residuals = Residuals(feedback, self.ranks) if feedback else None
        self.rows = self.ranks if op == "reduce_scatter" else 1
        self.bucket = bucket_of(MIXES[mix], SIZES, self.residuals, rows=self.rows)
        self.op, self.way = op, way

    def run(self, x: torch.Tensor, step: int, group: Any) -> tuple[bool, torch.Tensor]:
        """One step of what rank `x` [rows, numel] brings; whether it is finite, and the result."""
        how: dict[str, Any] = {"seed": 2**63 + 5, "step": step}
        for piece in self.bucket.with_residual.values():
            piece.residual.use(self.bucket.layout, self.ranks)
        out = x[0].clone() if self.op == "all_reduce" else x.new_empty(self.bucket.numel)
        given = () if self.op == "all_reduce" else (x,)
        if self.way == "core":
            call = getattr(backend.find(), f"compressed_{self.op}")
            work = call(out, *given, self.bucket.native, self.bucket.sides, **how)
            work.wait()
            return work.finite, out
        how["found_inf"] = found_inf = torch.zeros(1)
        excluded = replace(paths.BATCHED, needs=lambda *_: "not here")
        with patch.object(paths, "BATCHED", excluded if self.way == "runs" else paths.BATCHED):
            getattr(two_shot, self.op)(out, *given, self.bucket, group, **how)
        (used,) = self.bucket.exchanges.values()
        assert isinstance(used, Batched) == (self.way == "batched")
        if self.op == "reduce_scatter":  # each rank knows of its row
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
        return not found_inf.any(), out

    def stored(self) -> list[torch.Tensor]:
        """Both sides of all that is kept."""
        kept = [piece.residual for piece in self.bucket.with_residual.values()]
        pairs = [pair for residual in kept for _, pair in residual.pairs()]
        return [side for pair in pairs for side in pair]

    def commit(self) -> None:
        if self.residuals:
            self.residuals.commit(self.bucket.with_residual)


@contextmanager
def sent_bytes() -> Iterator[list[bytes]]:
    """What goes to the group meanwhile."""
    sent: list[bytes] = []

    def noted(function: Any, values: torch.Tensor, sizes: Any, *args: Any, **options: Any) -> Any:
        whole = values if isinstance(sizes, list) else values[:sizes]  # each rank gets all of it
        sent.append(whole.numpy().tobytes())
        return function(values, sizes, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all", "all_gather"):
            patch.setattr(payloads, name, partial(noted, getattr(payloads, name)))
        yield sent


def compare(rank: int, ranks: int, cases: list[tuple[Any, ...]]) -> list[list[float]]:
    """Compare steps in all ways; return sums of results, for ranks to compare."""
    gloo, sums = dist.new_group(backend="gloo"), []
    for mix, op, rule, dtype in cases:
        sides = {way: Side(mix, rule, op, way) for way in WAYS}
        # Ranks may differ in how they do it.
        mixed = Side(mix, rule, op, WAYS[1 + rank % 2])
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            x = torch.randn(mixed.rows, mixed.bucket.numel, generator=generator).to(dtype)
            if step == 1:
                x[0, 500:600] = 0
            if step == 2 and rank == 0:
                x[-1, 1010] = float("inf")
            sent, seen = {}, {}
            for way, side in sides.items():
                with sent_bytes() as sent[way]:
                    seen[way] = side.run(x, step, gloo)
            seen["mixed"] = mixed.run(x, step, gloo)
            finite, result = seen.pop("runs")
            for way, (also, other) in seen.items():
                what = f"{way}, {mix}, {op}, {rule}, {dtype}, step {step}"
                assert also == finite, what
                assert same_bits(other, result), what
            assert sent["batched"] == sent["runs"]
            for way, side in sides.items():
                for mine, kept in zip(side.stored(), sides["runs"].stored(), strict=True):
                    assert same_bits(mine, kept), f"{way}, {mix}, {op}, {rule}, {dtype}"
            if finite:
                for side in (*sides.values(), mixed):
                    side.commit()
            sums.append([] if op == "reduce_scatter" else [float(result[:9].double().sum())])
    dist.destroy_process_group(gloo)
    return sums


RANKS = [1, 2, 3, 4]
CASES = pairs(RANKS, list(MIXES), OPS, DTYPES)
WITH_FEEDBACK = pairs(["recode", "gather"], OPS, FEEDBACK, DTYPES)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ways_have_the_same_bits(pool, ranks):
    cases = [(mix, op, "residual", dtype) for n, mix, op, dtype in CASES if n == ranks]
    sums = pool.run(compare, cases, ranks=ranks, **PATIENT)
    assert all(str(each) == str(sums[0]) for each in sums)  # NaN is unequal to itself


@pytest.mark.parametrize("mix", ["recode", "gather"])
def test_every_kind_of_feedback_likewise(pool, mix):
    cases = [case for case in WITH_FEEDBACK if case[0] == mix]
    pool.run(compare, cases, ranks=3, **PATIENT)


@on_ranks(2)
def test_arguments_of_the_core(rank, ranks):
    side, how = Side("exact", None, "reduce_scatter", "core"), {"seed": 1, "step": 0}
    native, numel = backend.find(), side.bucket.numel
    call = partial(native.compressed_reduce_scatter, **how)
    layouts = side.bucket.native, side.bucket.sides
    x = torch.full((ranks, numel), float(rank + 1), dtype=torch.bfloat16)
    out = torch.empty(numel, dtype=torch.bfloat16)
    assert call(out, x, *layouts).get_future().wait() is out
    assert out.eq((ranks + 1) / 2).all()
    out.zero_()
    call(out, x.float(), *layouts).wait()
    assert out.eq((ranks + 1) / 2).all()  # the result of a wider input is narrowed
    for wrong in (out[1:], out.double()):
        with pytest.raises(RuntimeError, match=r"values|takes"):
            call(wrong, x, *layouts)
    one_row = Side("exact", None, "all_reduce", "core").bucket.native
    with pytest.raises(RuntimeError, match=f"Layout\\({ranks}\\)"):
        call(out, x, one_row, side.bucket.sides)


# ---------------------------------------------------------------- payloads that cannot be true


class Alone(SimpleNamespace):
    """A group of one that is never called."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def land(bucket: Bucket, change: Callable[[torch.Tensor, int], Payloads]) -> None:
    """Let C++ add up what `change` makes of this rank's payloads, in memory, and their bytes."""

    def came(payload: torch.Tensor, size: int, *args: Any, room: int, **options: Any) -> Payloads:
        memory = torch.zeros(size + room, dtype=torch.uint8)
        memory[:size] = payload[:size]
        return change(memory, size)

    plan = ExchangePlan(shown=whole(bucket.pieces))
    values = torch.randn(200, generator=torch.Generator().manual_seed(0))
    one = Batched(bucket, plan, Alone(), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "all_gather", came)
        how: dict[str, Any] = {"seed": 1, "step": 1, "divisor": 1, "found_inf": torch.zeros(1)}
        one.run(values, values, bucket, Alone(), **how)


@pytest.mark.parametrize("word", [0, 1, 3, 6, 4096, 2**31, 2**32 - 1])
@pytest.mark.parametrize("second", [False, True])
def test_sizes_in_payloads_that_cannot_be_true(word, second):
    bucket = bucket_of("lossless", [100, 100])
    runs = whole(bucket.pieces)

    def change(memory: torch.Tensor, size: int) -> Payloads:
        place = int(memory[:4].view(torch.int32)) if second else 0
        memory[place : place + 4] = torch.frombuffer(
            bytearray(struct.pack("<I", word)), dtype=torch.uint8
        )
        return memory, [(0, size)]

    with pytest.raises(WireMismatch, match="are possible"):
        land(bucket, change)
    coder = Coder(0, seed=1, step=1)
    payload = coder.encode(runs, torch.randn(200), None)
    change(payload, payload.numel())
    with pytest.raises(WireMismatch, match="are possible"):
        coder.decode(runs, payload, [torch.empty(100), torch.empty(100)], add=False)


def test_payloads_that_end_too_early():
    bucket = bucket_of("lossless", [100, 100])
    sizes: list[int] = []

    def whole_payload(memory: torch.Tensor, size: int) -> Payloads:
        sizes.append(size)
        return memory, [(0, size)]

    land(bucket, whole_payload)
    for cut in range(0, sizes[0], 4):
        with pytest.raises(WireMismatch, match="are possible"):
            land(bucket, lambda memory, size, cut=cut: (memory, [(0, cut)]))
    for places in (
        lambda memory, size: [(0, memory.numel())],
        lambda memory, size: [(2, size)],
        lambda memory, size: [(memory.numel(), 0)],
        lambda memory, size: [(0, size)] * 2,
    ):
        with pytest.raises(Error):
            land(bucket, lambda memory, size, places=places: (memory, places(memory, size)))


@on_ranks(2, backend="gloo")
@pytest.mark.parametrize("size", [-4, 6, 2**40])
def test_announced_sizes_that_cannot_be(rank, ranks, size):
    side = Side("variable", None, "all_reduce", "batched")
    if rank == 1:
        ours = torch.full((ranks,), size)
        dist.all_to_all_single(torch.empty_like(ours), ours)
        return
    with pytest.raises(WireMismatch, match=f"rank 1 is to send {size} bytes"):
        side.run(torch.ones(1, side.bucket.numel), 0, dist.group.WORLD)


def test_runs_that_cannot_be_cut_so():
    bucket = bucket_of("int4:block=64", [1000])
    (piece,) = bucket.pieces
    cpu = torch.device("cpu")
    Batched(bucket, ExchangePlan([[Run(piece, 64, 128), Run(piece, 960, 1000)]]), Alone(), cpu)
    for begin, end in [(32, 64), (64, 100), (64, 1001), (1024, 1100), (1, 1000)]:
        with pytest.raises(Error, match="cannot be cut"):
            Batched(bucket, ExchangePlan([[Run(piece, begin, end)]]), Alone(), cpu)
