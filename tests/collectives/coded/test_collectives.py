"""Coded collectives against a model in plain torch, byte for byte.

Owners decode, add and encode again; payloads of topk are gathered by all ranks instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _C, _test
from pycomm.codecs import RandomKey
from pycomm.communicator import Piece
from tests.collectives.ways import WAYS, bits
from tests.extent import each_value
from tests.ranks import attempt, run, run_processes

RANKS = [1, 2, 3, 4, 8]
CODECS = [
    "int8",
    "int4",
    "quant:bits=4,block=64,rounding=stochastic",
    "fp8",
    "fp16",
    "fp32",
    "eden:bits=2",
    "lossless",
    "topk:density=0.05",
    "topk:density=0.1,values=int8,indices=int12",
]
# Sizes of a model's parameters: incomplete blocks, parts smaller than a block, and zero.
TENSORS = {7: 1000, 3: 1, 9: 4099, 4: 0, 1: 128, 2: 20011}
SEED, STEP = 0x1234567890ABCDEF, 11
OWNED = dict(zip(TENSORS, CODECS, strict=False))
# Gathered pieces lie among owned ones, at the ends and in the middle.
WHOLE, CHUNKED = CODECS[-2:]
GATHERED = dict(zip(TENSORS, [WHOLE, "fp32", "int4", CHUNKED, "int8", CHUNKED], strict=True))
both = pytest.mark.parametrize("codecs", [OWNED, GATHERED], ids=["owned", "gathered"])


def built(codec: Any) -> Any:
    """Return the codec of that name, or a codec of a test as it is."""
    return pycomm.codec(codec) if isinstance(codec, str) else codec


def gradient(rank: int, tensor: int, step: int = 0) -> np.ndarray:
    random = np.random.default_rng([rank, tensor, step])
    return random.standard_normal(TENSORS[tensor]).astype(np.float32)


@dataclass
class Bucket:
    """One rank's tensors laid out in a bucket, with both residuals of each."""

    rank: int
    order: list[int]
    codecs: dict[int, Any]
    feedback: bool = True
    shared: bool = False
    residuals: dict[int, np.ndarray] = field(default_factory=dict)
    owner_residuals: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tensor in self.order if self.feedback else []:
            self.residuals[tensor] = gradient(self.rank, tensor, 100) / 50
            # Only an element's owner may have a residual for it, but every rank has the memory.
            self.owner_residuals[tensor] = gradient(0, tensor, 200) / 50

    def all_reduce(self, c, step: int = 0, average: bool = True) -> dict[int, np.ndarray]:
        data = np.concatenate([gradient(self.rank, t, step) for t in self.order])
        if self.shared:
            heap = np.asarray(c.allocate(data.size))
            heap[:] = data
            data = heap
        pieces = [
            Piece(
                TENSORS[t],
                built(self.codecs[t]),
                tensor=t,
                residual=self.residuals.get(t),
                owner_residual=self.owner_residuals.get(t),
            )
            for t in self.order
        ]
        assert c.all_reduce_coded(data, pieces, average=average, seed=SEED, step=STEP + step)
        ends = np.cumsum([TENSORS[t] for t in self.order])
        return dict(zip(self.order, np.split(data, ends[:-1]), strict=True))


def reduce_once(order, codecs, *, average=True, shared=(), **kwargs):
    """Return a job that makes one call and returns its result and residuals, by tensor.

    The buckets of ``shared`` ranks are in the heap.
    """

    def job(c):
        bucket = Bucket(c.rank, order, codecs, shared=c.rank in shared, **kwargs)
        result = bucket.all_reduce(c, average=average)
        return result, bucket.residuals, bucket.owner_residuals

    return job


def check(outcomes, codecs, average=True, feedback=True, nodes=None):
    """Compare with a model of whole tensors, byte for byte.

    A node sums exactly, and each value of its sum is coded, and has its residual, on one of its
    ranks. Without nodes each rank is one. Nodes are in the order of their lowest rank.
    """
    places = [*(nodes or range(len(outcomes)))]
    for tensor, codec in codecs.items():
        code, numel = built(codec), TENSORS[tensor]

        def through(p, hop, code=code, numel=numel, tensor=tensor):
            key = RandomKey(_test.hop_seed(SEED, hop), STEP, tensor)
            return code.reference_decode(code.reference_encode(p, key, 0), numel)

        total = None
        for k, node in enumerate(dict.fromkeys(places)):
            ranks = [r for r, place in enumerate(places) if place == node]
            p = reduce(add, [torch.from_numpy(gradient(r, tensor)) for r in ranks])
            wrote = {}
            if feedback:
                for r in ranks:
                    start = gradient(r, tensor, 100) / 50
                    wrote[r] = outcomes[r][1][tensor] != start
                    p = torch.where(torch.from_numpy(wrote[r]), p + torch.from_numpy(start), p)
                assert (sum(wrote[r].astype(int) for r in ranks) == 1).all()
            sent = through(p, k)
            for r, where in wrote.items():
                assert bits(outcomes[r][1][tensor][where]) == bits((p - sent).numpy()[where])
            total = sent if total is None else total + sent
        if average:
            total = total / len(outcomes)
        result, begin = total, gradient(0, tensor, 200) / 50
        if code.combine == "recode":
            if feedback:
                total = total + torch.from_numpy(begin)
            result = through(total, -1)
        left, owned = (total - result).numpy(), np.zeros(numel, np.int64)
        for r, (results, _, owner) in enumerate(outcomes):
            assert bits(results[tensor]) == bits(result.numpy()), (codec, tensor, r)
            if feedback:
                changed = owner[tensor] != begin
                assert np.array_equal(owner[tensor][changed], left[changed])
                owned += changed
        if feedback:
            owners = left != begin if code.combine == "recode" else owned * 0
            assert np.array_equal(owned, owners), "each element has one owner"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_of_the_model(codec, ranks):
    codecs = dict.fromkeys(TENSORS, codec)
    check(run(ranks, reduce_once(list(TENSORS), codecs), **WAYS["window"]), codecs)


@each_value
@pytest.mark.parametrize(
    "codecs", [dict.fromkeys(TENSORS, CODECS[2]), GATHERED], ids=["owned", "gathered"]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("segment_bytes", [0, 4, 700, 5000])
def test_result_is_independent_of_way_and_segments(way, segment_bytes, codecs):
    job = reduce_once(list(TENSORS), codecs)
    check(run(3, job, **WAYS[way], segment_bytes=segment_bytes), codecs)


@pytest.mark.parametrize("order", [[2, 9, 7, 1, 4, 3], [3, 4, 2, 7, 9, 1], [2], [4, 3]])
def test_result_is_independent_of_the_layout(order):
    codecs = dict.fromkeys(order, CODECS[2])
    check(run(4, reduce_once(order, codecs), **WAYS["window"]), codecs)


@both
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
def test_pieces_of_one_bucket_have_codecs_of_their_own(average, feedback, codecs):
    job = reduce_once(list(TENSORS), codecs, average=average, feedback=feedback)
    check(run(3, job, **WAYS["tcp"]), codecs, average, feedback)


@both
def test_between_processes(codecs):
    check(run_processes(3, reduce_once(list(TENSORS), codecs)), codecs)
    check(run_processes(2, reduce_once(list(TENSORS), codecs), transport="tcp"), codecs)


@pytest.mark.parametrize("codec", ["int4", "int8", "fp8"])
def test_nothing_is_lost_over_the_steps(codec):
    """The sent values plus the remaining residuals equal the inputs.

    This is not exact: each step rounds its float32 sums a few times, at values below 8, and half a
    unit in the last place is 2**-22 there.
    """
    ranks, steps = 3, 20

    def job(c):
        bucket = Bucket(c.rank, list(TENSORS), dict.fromkeys(TENSORS, codec))
        total = {t: np.zeros(TENSORS[t]) for t in TENSORS}
        for t in TENSORS:
            bucket.residuals[t][:] = 0
            bucket.owner_residuals[t][:] = 0
        for step in range(steps):
            for t, result in bucket.all_reduce(c, step).items():
                total[t] += result
        return total, bucket.residuals, bucket.owner_residuals

    outcomes = run(ranks, job)
    for t in TENSORS:
        put_in = sum(gradient(r, t, s).astype("d") for r in range(ranks) for s in range(steps))
        came_out = outcomes[0][0][t] * ranks
        owed = sum(o[1][t].astype("d") + o[2][t].astype("d") * ranks for o in outcomes)
        assert np.abs(put_in - came_out - owed).max(initial=0) < steps * ranks * 8 * 2**-22
        if TENSORS[t] > 200 and codec != "fp8":
            assert np.abs(put_in - came_out).max() > 1e-3, "feedback had something to do"


@each_value
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "fp32", WHOLE])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_non_finite_values_reach_every_rank(bad, codec, ranks):
    numel, place = 5000, 1234

    def job(c):
        x, owed = np.ones(numel, np.float32), np.full(numel, 0.25, np.float32)
        if c.rank == ranks - 1:
            x[place] = bad
        finite = c.all_reduce_coded(x, [Piece(numel, pycomm.codec(codec), residual=owed)])
        again = c.all_reduce_coded(np.ones(numel, np.float32), pycomm.codec(codec))
        return (finite, again, bits(x), not np.isfinite(x[place])), owed[place]

    outcomes = run(ranks, job)
    assert all(outcome == outcomes[0][0] for outcome, _ in outcomes)
    finite, again, _, seen = outcomes[0][0]
    assert (finite, again, seen) == (False, True, True)
    if codec not in ("fp16", "fp32"):
        assert outcomes[-1][1] == 0.25, "what could not be sent is owed as before"


def test_layouts_that_differ_are_an_error():
    def differ(change):
        def job(c):
            args = {"pieces": [300, 700], "tensor": 5}
            if c.rank == 1:
                args |= change
            pieces = [Piece(n, "quant", tensor=args["tensor"] + n) for n in args["pieces"]]
            c.all_reduce_coded(np.ones(1000, np.float32), pieces)

        return attempt(2, job)

    assert differ({}) == [None, None]
    for change in ({"pieces": [700, 300]}, {"tensor": 6}):
        for error in differ(change):
            assert isinstance(error, pycomm.errors.WireMismatch), change


def test_bad_pieces_are_refused_and_the_group_lives_on():
    def job(c):
        x = np.ones(1000, np.float32)
        with pytest.raises(pycomm.errors.Error, match="cover 999 of 1000"):
            c.all_reduce_coded(x, [Piece(999, "quant")])
        pieces = _C.Pieces()
        pieces.add(1000, _C.Codec("quant"), worker=(x.ctypes.data, 0))
        with pytest.raises(pycomm.errors.Error, match="none to write"):
            c.core.run_coded("all_reduce", x.ctypes.data, 0, pieces)
        return c.all_reduce_coded(x, "quant")

    assert all(run(2, job))


# ------------------------------------------------------------------------------------------- shards
# reduce_scatter_coded, of rows of shards.


# Size and codec of the shards of some parameters, numbered as in a model.
SHARDS = {7: 1000, 3: 1, 4: 0, 9: 4099, 2: 20011}
SHARD_CODECS = dict(zip(SHARDS, ["int8", "fp32", "int4", CODECS[2], "fp8"], strict=True))
ROW = sum(SHARDS.values())


def values(rank: int, rows: int, salt: int = 0) -> np.ndarray:
    random = np.random.default_rng([rank, salt])
    return random.standard_normal((rows, ROW)).astype(np.float32)


def residuals(rank: int, rows: int) -> dict[int, np.ndarray]:
    random = np.random.default_rng([rank, 99])
    return {
        tensor: (random.standard_normal((rows, numel)) / 50).astype(np.float32)
        for tensor, numel in SHARDS.items()
    }


def pieces(owed: dict[int, np.ndarray], codecs=SHARD_CODECS) -> list[Piece]:
    return [
        Piece(numel, built(codecs[tensor]), tensor=tensor, residual=owed.get(tensor))
        for tensor, numel in SHARDS.items()
    ]


def seed_of(rank: int, row: int) -> int:
    seed = _test.hop_seed(SEED, rank)
    return _test.hop_seed(seed, row) if row > 0 else seed


def coded(row: np.ndarray, owed: dict[int, np.ndarray], at: int, seed: int, codecs):
    """Return the decoded row, and update `owed[tensor][at]` to the new residual."""
    result, begin = row.copy(), 0
    for tensor, numel in SHARDS.items():
        code = built(codecs[tensor])
        p = torch.from_numpy(row[begin : begin + numel] + owed[tensor][at])
        payload = code.reference_encode(p, RandomKey(seed, STEP, tensor), 0)
        sent = code.reference_decode(payload, numel)
        owed[tensor][at] = (p - sent).numpy()
        result[begin : begin + numel] = sent.numpy()
        begin += numel
    return result


def model_of_reduce_scatter(ranks: int, average: bool, codecs):
    """Return the rows of the result, and each rank's residuals."""
    owed = [residuals(r, ranks) for r in range(ranks)]
    inputs = [values(r, ranks) for r in range(ranks)]
    rows = []
    for row in range(ranks):
        total = None
        for r in range(ranks):
            sent = coded(inputs[r][row], owed[r], row, seed_of(r, row), codecs)
            total = sent if total is None else total + sent
        rows.append(total / np.float32(ranks) if average else total)
    return rows, owed


def reduce_scatter(average: bool = True, in_place: bool = False, codecs=SHARD_CODECS):
    def job(c):
        data, owed = values(c.rank, c.size), residuals(c.rank, c.size)
        out = data[c.rank] if in_place else np.empty(ROW, np.float32)
        fine = c.reduce_scatter_coded(
            data, out, pieces(owed, codecs), average=average, seed=SEED, step=STEP
        )
        return fine, out.copy(), owed

    return job


def check_reduce_scatter(outcomes, average: bool = True, codecs=SHARD_CODECS) -> None:
    rows, owed = model_of_reduce_scatter(len(outcomes), average, codecs)
    for r, (fine, out, ours) in enumerate(outcomes):
        assert fine
        assert bits(out) == bits(rows[r])
        assert {t: bits(x) for t, x in ours.items()} == {t: bits(x) for t, x in owed[r].items()}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("average", [True, False])
def test_reduce_scatter_has_the_bytes_of_the_model(ranks, average):
    check_reduce_scatter(run(ranks, reduce_scatter(average)), average)


@each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("segment_bytes", [4, 5000])
def test_reduce_scatter_is_independent_of_way_and_segments(way, segment_bytes):
    options = {**WAYS[way], "segment_bytes": segment_bytes}
    check_reduce_scatter(run(3, reduce_scatter(), **options))
    check_reduce_scatter(run(2, reduce_scatter(in_place=True), **options))


def test_shards_between_processes():
    check_reduce_scatter(run_processes(3, reduce_scatter()))
    check_reduce_scatter(run_processes(2, reduce_scatter(), transport="tcp"))


def test_without_a_codec_it_is_the_plain_one():
    def job(c):
        data = values(c.rank, c.size)
        coded, plain = np.empty(ROW, np.float32), np.empty(ROW, np.float32)
        c.reduce_scatter_coded(data, coded, "cast:dtype=float32")
        c.reduce_scatter(data, plain, "avg")
        return bits(coded) == bits(plain)

    assert all(run(3, job))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_every_rank_knows_of_a_value_that_is_not_finite(bad):
    """The owner of another row sees it only in its own row."""

    def job(c):
        data, out = np.ones((c.size, ROW), np.float32), np.empty(ROW, np.float32)
        if c.rank == 1:
            data[2, 5] = bad
        owed = {7: np.full((c.size, 1000), 0.25, np.float32)}
        fine = c.reduce_scatter_coded(data, out, pieces(owed))
        seen = bool(np.isfinite(out).all())
        return fine, seen, bool((owed[7][2, :256] == 0.25).all())

    outcomes = run(3, job)
    assert [o[0] for o in outcomes] == [False] * 3
    assert [o[1] for o in outcomes] == [True, True, False]
    assert outcomes[1][2], "the block that travels as NaN keeps what it owes"


def test_wrong_sizes_are_refused_and_the_group_lives_on():
    def job(c):
        rows, row = np.ones((c.size, 1000), np.float32), np.ones(1000, np.float32)
        with pytest.raises(pycomm.Error, match="rows of that size"):
            c.reduce_scatter_coded(rows, row[:-1], "quant")
        with pytest.raises(pycomm.Error, match="2000 float32"):
            c.reduce_scatter_coded(rows, row, [Piece(1000, "quant", residual=row.copy())])
        return c.reduce_scatter_coded(rows, row, "quant")

    assert all(run(2, job))
