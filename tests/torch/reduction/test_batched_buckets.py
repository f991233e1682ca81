"""Buckets coded in one call have the bits, residuals and payloads of those coded run by run."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.errors import Error, WireMismatch
from pycomm.feedback import Feedback, Residuals
from pycomm.policy import Decision, Parameter
from pycomm.reduction import batched, coding, two_shot
from pycomm.reduction.batched import Batched
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import Coder, ExchangePlan, Run, whole
from pycomm.reduction.payloads import Payloads
from tests.extent import pairs
from tests.torch.pool import on_ranks
from tests.torch.reduction.test_saved_state import PATIENT

SIZES = [0, 1000, 1, 4099, 0, 77, 20011, 300, 3, 129]
STEPS = 3
MIXES = {
    "recode": ["int8", "fp32", "quant:bits=4,block=64,rounding=stochastic", "int4", "fp8", "bf16"],
    "gather": ["topk:density=0.05", "fp32", "int4", "int8", "topk:indices=int12,values=int8"],
    "rotated": ["eden:bits=1", "eden:bits=4", "mxfp4", "sign", "quant:bits=4,rounding=stochastic"],
    "variable": ["lossless", "int8", "lossless:dtype=bfloat16", "fp32"],
    "exact": ["fp32"],
}
FEEDBACK = [
    None,
    "residual",
    "residual:storage=bf16",
    "decay:0.9,storage=int8",
    "momentum:0.8,storage=bf16",
    "momentum:0.9,nesterov=true",
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPS = ["all_reduce", "reduce_scatter", "all_gather"]


class Side:
    """A bucket with feedback of its own, coded in one way or the other."""

    def __init__(self, mix: str, rule: str | None, op: str, *, batched: bool) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        codecs = itertools.cycle(MIXES[mix])
        decisions = [
            Decision(Parameter(f"p{i}", (numel,), torch.float32), pycomm.codec(codec), "test")
            for i, (numel, codec) in enumerate(zip(SIZES, codecs, strict=False))
        ]
        feedback = Feedback.of(rule) if op != "all_gather" else None
        self.residuals = Residuals(feedback, ranks) if feedback else None
        rows = ranks if op == "reduce_scatter" else 1
        cpu = torch.device("cpu")
        self.bucket = Bucket(decisions, range(len(SIZES)), self.residuals, cpu, rows=rows)
        self.op, self.key, self.is_batched = op, (op, rank, ranks), batched
        if not batched:
            self.bucket.batched[self.key] = None

    def run(self, x: torch.Tensor, step: int) -> tuple[bool, torch.Tensor]:
        """One step of what rank `x` [rows, numel] brings; whether it is finite, and the result."""
        ranks = dist.get_world_size()
        how: dict[str, Any] = {"seed": 2**63 + 5, "step": step}
        for piece in self.bucket.with_residual.values():
            assert piece.residual is not None
            piece.residual.use(self.bucket.layout, ranks)
        if self.op == "all_reduce":
            out = x[0].clone()
            finite = two_shot.all_reduce(out, self.bucket, dist.group.WORLD, **how)
        elif self.op == "reduce_scatter":
            out = x.new_empty(self.bucket.numel)
            finite = two_shot.reduce_scatter(out, x, self.bucket, dist.group.WORLD, **how)
        else:
            out = x.new_empty(ranks, self.bucket.numel)
            finite = two_shot.all_gather(out, x[0], self.bucket, dist.group.WORLD, **how)
        assert isinstance(self.bucket.batched[self.key], Batched) == self.is_batched
        return bool(finite), out

    def stored(self) -> list[torch.Tensor]:
        """Both sides of all that is kept."""
        kept = [piece.residual for piece in self.bucket.with_residual.values()]
        pairs = [pair for residual in kept for _, pair in residual.pairs()]
        return [side for pair in pairs for side in pair]


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@contextmanager
def sent_bytes() -> Iterator[list[bytes]]:
    """What goes to the group meanwhile."""
    sent: list[bytes] = []

    def noted(function: Any, values: torch.Tensor, sizes: Any, *args: Any, **options: Any) -> Any:
        whole = values if isinstance(sizes, list) else values[:sizes]  # each rank gets all of it
        sent.append(whole.numpy().tobytes())
        return function(values, sizes, *args, **options)

    places = [(coding, "all_to_all"), (coding, "gather_payloads")]
    places += [(batched, "all_to_all"), (batched, "all_gather")]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            patch.setattr(module, name, partial(noted, getattr(module, name)))
        yield sent


def compare(rank: int, ranks: int, cases: list[tuple[Any, ...]]) -> None:
    for mix, op, rule, dtype in cases:
        in_one = Side(mix, rule, op, batched=True)
        by_runs = Side(mix, rule, op, batched=False)
        # Ranks may differ in how they do it.
        mixed = Side(mix, rule, op, batched=rank % 2 == 0)
        rows = ranks if op == "reduce_scatter" else 1
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            x = torch.randn(rows, in_one.bucket.numel, generator=generator).to(dtype)
            if step == 1:
                x[0, 500:600] = 0
            if step == 2 and rank == 0:
                x[-1, 1010] = float("inf")
            with sent_bytes() as ours:
                finite, result = in_one.run(x, step)
            with sent_bytes() as theirs:
                other_finite, other = by_runs.run(x, step)
            what = f"{mix}, {op}, {rule}, {dtype}, step {step}"
            assert ours == theirs, what
            assert finite == other_finite, what
            assert equal_bits(result, other), what
            third_finite, third = mixed.run(x, step)
            assert (third_finite, equal_bits(third, other)) == (finite, True), what
            for mine, kept in zip(in_one.stored(), by_runs.stored(), strict=True):
                assert equal_bits(mine, kept), what
            for side in (in_one, by_runs, mixed):
                if side.residuals and finite:
                    side.residuals.commit(side.bucket.with_residual)


RANKS = [1, 2, 3, 4]
CASES = pairs(RANKS, list(MIXES), OPS, DTYPES)
WITH_FEEDBACK = pairs(["recode", "gather"], OPS[:2], FEEDBACK, DTYPES)


@pytest.mark.parametrize("ranks", RANKS)
def test_one_call_has_the_bits_of_many(pool, ranks):
    cases = [(mix, op, "residual", dtype) for n, mix, op, dtype in CASES if n == ranks]
    pool.run(compare, cases, ranks=ranks, backend="gloo", **PATIENT)


@pytest.mark.parametrize("mix", ["recode", "gather"])
def test_every_kind_of_feedback_likewise(pool, mix):
    cases = [case for case in WITH_FEEDBACK if case[0] == mix]
    pool.run(compare, cases, ranks=3, backend="gloo", **PATIENT)


# ---------------------------------------------------------------- payloads that cannot be true


class Alone(SimpleNamespace):
    """A group of one that is never called."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def lossless_bucket() -> Bucket:
    codecs = [pycomm.codec("lossless")] * 2
    decisions = [
        Decision(Parameter(f"p{i}", (100,), torch.float32), codec, "test")
        for i, codec in enumerate(codecs)
    ]
    return Bucket(decisions, range(2), None, torch.device("cpu"))


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
        patch.setattr(batched, "all_gather", came)
        one.run(values, values, bucket.sides, Alone(), seed=1, step=1, divisor=1)


@pytest.mark.parametrize("word", [0, 1, 3, 6, 4096, 2**31, 2**32 - 1])
@pytest.mark.parametrize("second", [False, True])
def test_sizes_in_payloads_that_cannot_be_true(word, second):
    bucket = lossless_bucket()
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
    bucket = lossless_bucket()
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
    side = Side("variable", None, "all_reduce", batched=True)
    if rank == 1:
        ours = torch.full((ranks,), size)
        dist.all_to_all_single(torch.empty_like(ours), ours)
        return
    with pytest.raises(WireMismatch, match=f"rank 1 is to send {size} bytes"):
        side.run(torch.ones(1, side.bucket.numel), 0)


def test_runs_that_cannot_be_cut_so():
    decided = Decision(Parameter("p", (1000,), torch.float32), pycomm.codec("int4:block=64"), "")
    bucket = Bucket([decided], [0], None, torch.device("cpu"))
    (piece,) = bucket.pieces
    cpu = torch.device("cpu")
    Batched(bucket, ExchangePlan([[Run(piece, 64, 128), Run(piece, 960, 1000)]]), Alone(), cpu)
    for begin, end in [(32, 64), (64, 100), (64, 1001), (1024, 1100), (1, 1000)]:
        with pytest.raises(Error, match="cannot be cut"):
            Batched(bucket, ExchangePlan([[Run(piece, begin, end)]]), Alone(), cpu)
