"""all_reduce_coded of ranks on several nodes: exact inside a node, coded between the nodes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _test
from pycomm.codecs import RandomKey
from tests.collectives.coded.test_collectives import (
    OWNED,
    SEED,
    STEP,
    TENSORS,
    Bucket,
    built,
    gradient,
)
from tests.collectives.test_hierarchical import NODES, SITES, options, sited
from tests.collectives.ways import bits
from tests.ranks import attempt, run, run_processes

LEVELS = [name for name in NODES if name not in ("flat", "one")]


def members(nodes):
    """Return the ranks of each node; nodes are in the order of their lowest rank."""
    return [[r for r, n in enumerate(nodes) if n == node] for node in dict.fromkeys(nodes)]


def job(codecs, shared=lambda rank: False):
    def reduce(c):
        bucket = Bucket(c.rank, list(TENSORS), codecs, shared=shared(c.rank))
        start = {t: x.copy() for t, x in bucket.residuals.items()}
        result = bucket.all_reduce(c)
        return result, start, bucket.residuals, bucket.owner_residuals

    return reduce


def check(outcomes, nodes, codecs):
    """Compare with a model of whole tensors; each residual lies on one rank of its node."""
    by_node = members(nodes)
    for tensor, codec in codecs.items():
        code, numel = built(codec), TENSORS[tensor]

        def through(p, hop, code=code, numel=numel, tensor=tensor):
            key = RandomKey(_test.hop_seed(SEED, hop), STEP, tensor)
            return code.reference_decode(code.reference_encode(p, key, 0), numel)

        total = None
        for k, ranks in enumerate(by_node):
            p = sum_of([torch.from_numpy(gradient(r, tensor)) for r in ranks])
            # The residual that counts is the one that was written: exact codecs write zeros.
            owed = torch.zeros(numel)
            coded = torch.zeros(numel, dtype=torch.int64)
            for r in ranks:
                _, start, residuals, _ = outcomes[r]
                wrote = torch.from_numpy(residuals[tensor] != start[tensor])
                owed[wrote] = torch.from_numpy(start[tensor])[wrote]
                coded += wrote
            assert bool((coded == 1).all()), "each value of a node's sum is coded by one rank"
            p = p + owed
            sent = through(p, k)
            for r in ranks:
                _, start, residuals, _ = outcomes[r]
                wrote = residuals[tensor] != start[tensor]
                assert np.array_equal(residuals[tensor][wrote], (p - sent).numpy()[wrote])
            total = sent if total is None else total + sent
        total, result = total / len(nodes), total / len(nodes)
        begin, owned = gradient(0, tensor, 200) / 50, np.zeros(numel, np.int64)
        if code.combine == "recode":
            total = total + torch.from_numpy(begin)
            result = through(total, -1)
        for outcome in outcomes:
            assert bits(outcome[0][tensor]) == bits(result.numpy()), (codec, tensor)
            changed = outcome[3][tensor] != begin
            assert np.array_equal(outcome[3][tensor][changed], (total - result).numpy()[changed])
            owned += changed
        owners = (total - result).numpy() != begin if code.combine == "recode" else 0
        assert np.array_equal(owned, owners + 0 * owned), "one owner each"


def sum_of(values):
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("segment_bytes", [0, 700])
def test_bytes_of_the_model(name, segment_bytes):
    nodes = NODES[name]
    outcomes = run(len(nodes), job(OWNED), **options(name, segment_bytes=segment_bytes))
    check(outcomes, nodes, OWNED)


@pytest.mark.parametrize("shared", [(), (0,), (0, 1, 2, 3)], ids=len)
@pytest.mark.parametrize("segment_bytes", [0, 8192])
def test_between_processes(shared, segment_bytes):
    """Ranks of a node read the values of those whose bucket is in the heap of their group."""
    more = options("2+2", segment_bytes=segment_bytes) | {"transport": "shm"}
    outcomes = run_processes(4, job(OWNED, lambda rank: rank in shared), **more)
    check(outcomes, NODES["2+2"], OWNED)


def test_values_that_the_kernel_reads_have_the_same_sums():
    def reduce(c):
        x = np.random.default_rng(c.rank).standard_normal(1 << 20, np.float32)
        c.all_reduce_coded(x, pycomm.codec("int8"))
        return bits(x)

    processes = run_processes(4, reduce, **(options("2+2") | {"transport": "shm"}))
    assert processes == run(4, reduce, **options("2+2"))


def test_each_byte_of_a_payload_goes_over_a_link_once():
    """Two nodes of two ranks exchange half the flat traffic, and every rank sends its part."""

    def sent(c):
        before = c.wire_bytes()
        c.all_reduce_coded(np.ones(1 << 18, np.float32), pycomm.codec("int8"))
        c.barrier()
        return c.wire_bytes() - before

    payload = pycomm.codec("int8").encoded_bytes(1 << 18)
    by_levels = run(4, sent, **options("2+2"))
    flat = run(4, sent, **options("2+2", algo="flat"))
    assert all(0.5 * payload <= n < 0.6 * payload for n in by_levels)
    assert all(n >= 0.9 * payload for n in flat)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["2+2", "1+3"])
@pytest.mark.parametrize("segment_bytes", [0, 700])
def test_non_finite_values_reach_every_rank(bad, name, segment_bytes):
    def overflow(c):
        x = np.ones(5000, np.float32)
        if c.rank == 1:
            x[1234] = bad
        finite = c.all_reduce_coded(x, pycomm.codec("int4"))
        again = c.all_reduce_coded(np.ones(5000, np.float32), pycomm.codec("int4"))
        return finite, again, bits(x), bool(np.isfinite(x[1234]))

    outcomes = run(4, overflow, **options(name, segment_bytes=segment_bytes))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][:2] == (False, True)
    assert outcomes[0][3] is False


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("segment_bytes", [0, 700])
def test_a_rank_that_does_not_come_is_named(lost, segment_bytes):
    """Its own node may wait for it, or another one."""

    def absent(c):
        if c.rank == lost:
            return time.sleep(1.0)
        return c.all_reduce_coded(np.ones(5000, np.float32), pycomm.codec("int8"), timeout=0.5)

    outcomes = attempt(4, absent, **options("2+2", segment_bytes=segment_bytes))
    for error in outcomes[:lost] + outcomes[lost + 1 :]:
        assert isinstance(error, pycomm.Timeout)
        assert f"rank {lost}" in str(error)


@pytest.mark.parametrize("name", ["2+2", "mixed", "3+1", "2+1+2", "hosts of two ranks"])
def test_a_site_codes_its_sum_as_a_rank_would(name):
    check(run(len(SITES[name][0]), job(OWNED), **sited(name)), SITES[name][0], OWNED)
