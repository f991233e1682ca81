"""reduce_scatter_coded and all_gather_coded against a model in plain torch, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _test
from pycomm.codecs import RandomKey
from pycomm.communicator import Piece
from tests.collectives.coded.test_collectives import built
from tests.collectives.ways import WAYS, bits
from tests.extent import each_value
from tests.ranks import run, run_processes

RANKS = [1, 2, 3, 4, 8]
STOCHASTIC = "quant:bits=4,block=64,rounding=stochastic"
# Size and codec of the shards of some parameters, numbered as in a model.
SHARDS = {7: 1000, 3: 1, 4: 0, 9: 4099, 2: 20011}
CODECS = dict(zip(SHARDS, ["int8", "fp32", "int4", STOCHASTIC, "fp8"], strict=True))
ROW = sum(SHARDS.values())
SEED, STEP = 0x1234567890ABCDEF, 11


def values(rank: int, rows: int, salt: int = 0) -> np.ndarray:
    random = np.random.default_rng([rank, salt])
    return random.standard_normal((rows, ROW)).astype(np.float32)


def residuals(rank: int, rows: int) -> dict[int, np.ndarray]:
    random = np.random.default_rng([rank, 99])
    return {
        tensor: (random.standard_normal((rows, numel)) / 50).astype(np.float32)
        for tensor, numel in SHARDS.items()
    }


def pieces(owed: dict[int, np.ndarray], codecs=CODECS) -> list[Piece]:
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


def reduce_scatter(average: bool = True, in_place: bool = False, codecs=CODECS):
    def job(c):
        data, owed = values(c.rank, c.size), residuals(c.rank, c.size)
        out = data[c.rank] if in_place else np.empty(ROW, np.float32)
        fine = c.reduce_scatter_coded(
            data, out, pieces(owed, codecs), average=average, seed=SEED, step=STEP
        )
        return fine, out.copy(), owed

    return job


def check_reduce_scatter(outcomes, average: bool = True, codecs=CODECS) -> None:
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


def all_gather(in_place: bool, codecs=CODECS):
    def job(c):
        out, owed = np.empty((c.size, ROW), np.float32), residuals(c.rank, 1)
        row = values(c.rank, 1)[0]
        if in_place:
            out[c.rank] = row
            row = out[c.rank]
        fine = c.all_gather_coded(row, out, pieces(owed, codecs), seed=SEED, step=STEP)
        return fine, out, owed

    return job


def check_all_gather(outcomes, codecs=CODECS) -> None:
    owed = [residuals(r, 1) for r in range(len(outcomes))]
    rows = [coded(values(r, 1)[0], owed[r], 0, seed_of(r, 0), codecs) for r in range(len(outcomes))]
    for r, (fine, out, ours) in enumerate(outcomes):
        assert fine
        assert bits(out) == bits(np.stack(rows))
        assert {t: bits(x) for t, x in ours.items()} == {t: bits(x) for t, x in owed[r].items()}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("in_place", [True, False])
def test_all_gather_has_the_bytes_of_the_model(ranks, in_place):
    check_all_gather(run(ranks, all_gather(in_place)))


@pytest.mark.parametrize("way", WAYS)
def test_all_gather_is_independent_of_way_and_segments(way):
    check_all_gather(run(3, all_gather(False), **WAYS[way], segment_bytes=700))


def test_between_processes():
    check_reduce_scatter(run_processes(3, reduce_scatter()))
    check_all_gather(run_processes(2, all_gather(False), transport="tcp"))


def test_two_halves_without_codecs_are_the_plain_ones():
    def job(c):
        data = values(c.rank, c.size)
        half, plain = np.empty(ROW, np.float32), np.empty(ROW, np.float32)
        c.reduce_scatter_coded(data, half, "cast:dtype=float32")
        c.reduce_scatter(data, plain, "avg")
        whole = np.empty((c.size, ROW), np.float32)
        c.all_gather_coded(half, whole, "cast:dtype=float32")
        c.all_reduce(data, "avg")
        return bits(half) == bits(plain) and bits(whole) == bits(data)

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
        all_fine = c.all_gather_coded(out, np.empty((c.size, ROW), np.float32), "quant")
        return fine, all_fine, seen, bool((owed[7][2, :256] == 0.25).all())

    outcomes = run(3, job)
    assert [o[0] for o in outcomes] == [False] * 3
    assert [o[1] for o in outcomes] == [False] * 3
    assert [o[2] for o in outcomes] == [True, True, False]
    assert outcomes[1][3], "the block that travels as NaN keeps what it owes"


def test_wrong_sizes_are_refused_and_the_group_lives_on():
    def job(c):
        rows, row = np.ones((c.size, 1000), np.float32), np.ones(1000, np.float32)
        with pytest.raises(pycomm.Error, match="rows of that size"):
            c.reduce_scatter_coded(rows, row[:-1], "quant")
        with pytest.raises(pycomm.Error, match="rows of that size"):
            c.all_gather_coded(row, rows[1:], "quant")
        with pytest.raises(pycomm.Error, match="pieces"):
            c.all_gather_coded(row, rows, [Piece(999, "quant")])
        with pytest.raises(pycomm.Error, match="2000 float32"):
            c.reduce_scatter_coded(rows, row, [Piece(1000, "quant", residual=row.copy())])
        with pytest.raises(pycomm.Error, match="takes float32"):
            c.reduce_scatter_coded(rows.astype("d"), row, "quant")
        return c.reduce_scatter_coded(rows, row, "quant")

    assert all(run(2, job))
