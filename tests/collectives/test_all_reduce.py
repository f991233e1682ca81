"""all_reduce on every way: exact on integers, and always the same bits on all ranks."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pycomm import _C
from tests.collectives.ways import RANKS, REDUCIBLE, SIZES, TINY, WAYS, bits, floats, integers
from tests.extent import each_value
from tests.ranks import run, run_processes

ways = pytest.mark.parametrize("way", WAYS)


def sums_of_integers(c):
    results = []
    for numel in SIZES:
        x = integers(c.rank, numel)
        c.all_reduce(x)
        results.append(x)
    return results


def check_sums_of_integers(outcomes):
    totals = [sum(integers(r, numel) for r in range(len(outcomes))) for numel in SIZES]
    for results in outcomes:
        for numel, result, total in zip(SIZES, results, totals, strict=True):
            assert np.array_equal(result, total), numel


@ways
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_of_integers_are_exact(way, ranks):
    check_sums_of_integers(run(ranks, sums_of_integers, **WAYS[way]))


@ways
def test_sums_in_tiny_segments_are_exact(way):
    check_sums_of_integers(run(3, sums_of_integers, **WAYS[way], **TINY))


@each_value
@pytest.mark.parametrize("transport", ["shm", "auto", "tcp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_of_integers_are_exact_between_processes(transport, ranks):
    check_sums_of_integers(run_processes(ranks, sums_of_integers, transport=transport))


@pytest.mark.parametrize("algo", ["direct", "ring"])
def test_channels_over_shared_memory_between_processes(algo):
    check_sums_of_integers(run_processes(3, sums_of_integers, algo=algo, **TINY))


def sums_of_floats(c):
    results = []
    for numel in SIZES:
        x = floats(c.rank, numel)
        c.all_reduce(x, "avg")
        results.append(bits(x))
    return results


@pytest.mark.parametrize("ranks", RANKS)
def test_window_and_direct_and_tcp_give_the_bits_of_rank_order(ranks):
    want = []
    for numel in SIZES:
        mean = floats(0, numel)
        for r in range(1, ranks):
            mean = mean + floats(r, numel)
        want.append(bits(mean / np.float32(ranks)))
    for options in (
        WAYS["window"],
        WAYS["direct"],
        WAYS["tcp"],
        WAYS["direct"] | TINY,
        WAYS["tcp"] | {"segment_bytes": 4096},
    ):
        for result in run(ranks, sums_of_floats, **options):
            assert result == want


@pytest.mark.parametrize("ranks", RANKS)
def test_ring_gives_all_ranks_the_same_bits_whatever_the_segments(ranks):
    first, *others = run(ranks, sums_of_floats, **WAYS["ring"])
    others += run(ranks, sums_of_floats, **WAYS["ring"], **TINY)
    others += run(ranks, sums_of_floats, **WAYS["tcp-ring"])
    assert all(other == first for other in others)


def raw(rank: int, dtype: _C.DType, numel: int) -> ctypes.Array:
    """Return arbitrary bytes, which are valid values of every dtype but bool."""
    random = np.random.default_rng([rank, dtype.value])
    top = 2 if dtype == _C.DType.bool else 256
    data = random.integers(0, top, numel * _C.size_of(dtype), dtype=np.uint8).tobytes()
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)


@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
def test_every_dtype_and_op_is_the_core_reduction_in_rank_order(way):
    ranks, sizes = 3, [33, 5000]

    def job(c):
        results = []
        for dtype, op in REDUCIBLE:
            for numel in sizes:
                x = raw(c.rank, dtype, numel)
                c.core.all_reduce(ctypes.addressof(x), numel, dtype, op, 0.75 + c.rank)
                results.append(bytes(x))
        return results

    want = []
    for dtype, op in REDUCIBLE:
        for numel in sizes:
            inputs = [raw(r, dtype, numel) for r in range(ranks)]
            addresses = [ctypes.addressof(x) for x in inputs]
            for r, address in enumerate(addresses if op == _C.ReduceOp.premul_sum else []):
                _C.scale(dtype, address, address, numel, 0.75 + r)
            _C.reduce(dtype, op, addresses, addresses[0], numel)
            want.append(bytes(inputs[0]))
    for results in run(ranks, job, **WAYS[way]):
        for i, result in enumerate(results):
            assert result == want[i], (REDUCIBLE[i // len(sizes)], sizes[i % len(sizes)])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_reduces_every_op(ranks):
    numel = 1000
    ops = {
        "sum": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "bxor": np.bitwise_xor,
        "bor": np.bitwise_or,
        "band": np.bitwise_and,
    }

    def job(c):
        results = {}
        for op in ops:
            results[op] = integers(c.rank, numel, "int64")
            c.all_reduce(results[op], op)
        results["avg"] = integers(c.rank, numel, "int64")
        c.all_reduce(results["avg"], "avg")
        results["premul_sum"] = integers(c.rank, numel)
        c.all_reduce(results["premul_sum"], "premul_sum", factor=0.5)
        return results

    inputs = [integers(r, numel, "int64") for r in range(ranks)]
    for results in run(ranks, job, **WAYS["ring"], **TINY):
        for op, function in ops.items():
            assert np.array_equal(results[op], function.reduce(inputs)), op
        assert np.array_equal(results["avg"], sum(inputs) // ranks)
        halves = sum(integers(r, numel) for r in range(ranks)) * 0.5
        assert np.array_equal(results["premul_sum"], halves)


def test_averages_divide_the_sum_once():
    def job(c):
        x = np.full(3, 1.0 if c.rank == 0 else 0.0, np.float32)
        c.all_reduce(x, "avg")
        return x

    for way in WAYS.values():
        for result in run(3, job, **way):
            assert np.array_equal(result, np.full(3, np.float32(1) / np.float32(3)))
