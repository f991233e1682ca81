"""Coded collectives whose payloads are gathered, against a model in plain torch, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs import RandomKey
from pycomm.communicator import Piece
from tests.collectives.coded import test_collectives as test_coded
from tests.collectives.coded.test_collectives import SEED, STEP, TENSORS, Bucket, gradient
from tests.collectives.test_hierarchical import options
from tests.collectives.ways import WAYS, bits
from tests.extent import each_value
from tests.ranks import attempt, run, run_processes

WHOLE, CHUNKED = "topk:density=0.05", "topk:density=0.1,values=int8,indices=int12"
# Gathered pieces lie among owned ones, at the ends and in the middle.
MIXED = dict(zip(TENSORS, [WHOLE, "fp32", "int4", CHUNKED, "int8", CHUNKED], strict=True))


def model(ranks: int, tensor: int, codec: str, average: bool):
    """Return the result and each rank's residual."""
    code, numel = pycomm.codec(codec), TENSORS[tensor]
    total, residuals = None, []
    for r in range(ranks):
        p = torch.from_numpy(gradient(r, tensor) + gradient(r, tensor, 100) / 50)
        key = RandomKey(_C.hop_seed(SEED, r), STEP, tensor, r, ranks)
        sent = code.reference_decode(code.reference_encode(p, key, 0), numel)
        residuals.append(p - sent)
        total = sent if total is None else total + sent
    return (total / ranks if average else total).numpy(), [e.numpy() for e in residuals]


def job(average: bool = True, codecs=MIXED):
    def reduce(c):
        bucket = Bucket(c.rank, list(TENSORS), codecs)
        result = bucket.all_reduce(c, average=average)
        return result, bucket.residuals, bucket.owner_residuals

    return reduce


def check(outcomes, average: bool = True) -> None:
    dense = {t: codec for t, codec in MIXED.items() if not codec.startswith("topk")}
    test_coded.check(outcomes, dense, average)
    for tensor in MIXED.keys() - dense.keys():
        result, residuals = model(len(outcomes), tensor, MIXED[tensor], average)
        for r, (results, worker, owner) in enumerate(outcomes):
            assert bits(results[tensor]) == bits(result), (tensor, r)
            assert bits(worker[tensor]) == bits(residuals[r]), (tensor, r)
            assert bits(owner[tensor]) == bits(gradient(0, tensor, 200) / 50), "nobody owns it"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("average", [True, False])
def test_bytes_of_the_model(ranks, average):
    check(run(ranks, job(average), **WAYS["window"]), average)


@each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("segment_bytes", [4, 5000])
def test_result_does_not_depend_on_transport_or_segments(way, segment_bytes):
    check(run(3, job(), **WAYS[way], segment_bytes=segment_bytes))


def test_between_processes():
    check(run_processes(3, job()))
    check(run_processes(2, job(), transport="tcp"))


@pytest.mark.parametrize("name", ["2+2", "mixed", "2+1+2"])
def test_on_nodes_all_ranks_have_one_result(name):
    """A node's sum is encoded once, by one rank, and nothing of it is lost."""

    def exchange(c):
        x, owed = gradient(c.rank, 2), np.zeros(TENSORS[2], np.float32)
        exact = x.copy()
        c.all_reduce(exact, "sum")
        c.all_reduce_coded(x, [Piece(len(x), WHOLE, residual=owed)], average=False)
        return x, owed, exact

    nodes = options(name)["nodes"]
    outcomes = run(len(nodes), exchange, **options(name))
    assert len({bits(x) for x, _, _ in outcomes}) == 1
    result, _, exact = outcomes[0]
    count = len(set(nodes))
    assert 0 < np.count_nonzero(result) <= count * -(-len(result) * 5 // 100)
    owed = sum(o[1].astype("d") for o in outcomes)
    # The error is a few float32 sums of values below 16, where half an ulp is 2**-21.
    assert np.abs(result + owed - exact).max() < 8 * 2**-21


def test_each_half_takes_gathered_codecs():
    """In a reduce_scatter a payload goes only to the owner of its row."""
    ranks, row = 3, 5000

    def exchange(c):
        data = np.random.default_rng(c.rank).standard_normal((ranks, row)).astype("f")
        owed, out = np.zeros((ranks, row), np.float32), np.empty(row, np.float32)
        c.reduce_scatter_coded(data, out, [Piece(row, WHOLE, residual=owed)], average=False)
        rows = np.empty((ranks, row), np.float32)
        c.all_gather_coded(out, rows, CHUNKED)
        return data, owed, out, rows

    outcomes = run(ranks, exchange)
    code = pycomm.codec(CHUNKED)
    for r, (_, _, out, _) in enumerate(outcomes):
        sent = [data[r] - owed[r] for data, owed, _, _ in outcomes]
        assert np.array_equal(out, (sent[0] + sent[1]) + sent[2])
        assert all(np.count_nonzero(part) == 250 for part in sent)
        decoded = code.decode(code.encode(torch.from_numpy(out)), row)
        assert all(bits(o[3][r]) == bits(decoded.numpy()) for o in outcomes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_non_finite_values_reach_every_rank(ranks):
    def overflow(c):
        x, owed = np.ones(5000, np.float32), np.full(5000, 0.25, np.float32)
        if c.rank == ranks - 1:
            x[1234] = np.inf
        finite = c.all_reduce_coded(x, [Piece(5000, WHOLE, residual=owed)])
        again = c.all_reduce_coded(np.ones(5000, np.float32), WHOLE)
        return finite, again, bool(np.isfinite(x[1234])), float(owed[1234]) == 0.25

    outcomes = run(ranks, overflow)
    assert [o[:3] for o in outcomes] == [(False, True, False)] * ranks
    assert outcomes[-1][3], "what could not be sent is owed as before"


def test_codecs_that_differ_are_an_error_on_every_rank():
    def differ(c):
        codec = WHOLE if c.rank == 1 else "quant:bits=4"
        c.all_reduce_coded(np.ones(1000, np.float32), codec)

    for error in attempt(3, differ):
        assert isinstance(error, pycomm.WireMismatch)
        assert "topk" in str(error)
        assert "bits=4" in str(error)


def test_bytes_are_those_of_the_payloads():
    """Every rank sends its payload to each of the others, and nothing else."""
    numel, ranks = 1 << 18, 3

    def sent(c):
        c.all_reduce_coded(np.ones(numel, np.float32), WHOLE)  # connects the ranks
        before = c.wire_bytes()
        c.all_reduce_coded(np.ones(numel, np.float32), WHOLE)
        bytes_sent = c.wire_bytes() - before
        c.barrier()  # waits for the answers to closes
        return bytes_sent

    payload = (ranks - 1) * pycomm.codec(WHOLE).encoded_bytes(numel)
    assert all(payload <= n < 1.01 * payload for n in run(ranks, sent, **WAYS["tcp"]))
