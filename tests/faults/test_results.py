"""Differing results are reported by the next operation, with PYCOMM_CHECK=results.

Bad memory is simulated by mapping the same page twice: a write to one half of such an array changes
the other half, so the rank ends with other bytes than it was given.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest

from pycomm.communicator import Communicator
from pycomm.errors import Error, WireMismatch
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt, run, run_processes

ways = pytest.mark.parametrize("way", WAYS)
CHECK = {"check": "results"}
PAGE = mmap.PAGESIZE // 4


def bad_memory() -> np.ndarray:
    """Return two pages of float32 that share their memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed, page = 0x10, mmap.PAGESIZE
    file = os.memfd_create("page")
    os.truncate(file, page)
    place = libc.mmap(None, 2 * page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for half in (place, place + page):
        both = mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mmap(half, page, both, mmap.MAP_SHARED | fixed, file, 0) == half
    os.close(file)
    return np.frombuffer((ctypes.c_float * (2 * PAGE)).from_address(place), "float32")


def memory(bad: bool) -> np.ndarray:
    x = bad_memory() if bad else np.empty(2 * PAGE, "float32")
    x[:] = np.arange(2 * PAGE) % 100
    return x


def part(c: Communicator) -> np.ndarray:
    return np.arange(600, dtype="float32") + c.rank


# The calls of a rank whose memory may be bad, and their names in the error.
OPS = {
    "all_reduce": (lambda c, x: c.all_reduce(x), "all_reduce #2 (sum of 2048 float32)"),
    "broadcast": (lambda c, x: c.broadcast(x), "broadcast #2 (2048 float32, root 0)"),
    "all_gather": (lambda c, x: c.all_gather(part(c), x[: 600 * c.size]), "all_gather #2 (600"),
    "coded": (
        lambda c, x: c.all_reduce_coded(x, "quant"),
        "all_reduce #2 (avg of 2048 float32, quant:bits=8",
    ),
    "coded rows": (
        lambda c, x: c.all_gather_coded(part(c), x[: 600 * c.size], "quant"),
        "all_gather #2 (600 float32, quant:bits=8",
    ),
}


def verdict(error: BaseException) -> str:
    """Return which ranks differ, and in what."""
    assert isinstance(error, WireMismatch), error
    return str(error).split(";")[0]


@each_value
@ways
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_the_rank_whose_result_differs_is_named(way, ranks, op):
    call, name = OPS[op]

    def job(c):
        c.barrier()
        call(c, memory(bad=c.rank == ranks - 1))
        c.all_reduce(np.ones(10))
        c.barrier()  # over channels some ranks get the error only here

    errors = attempt(ranks, job, **CHECK, **WAYS[way])
    assert len({str(error) for error in errors}) == 1
    what, _, sides = verdict(errors[0]).partition(": rank ")
    assert what.startswith(f"ranks disagree on the result of {name}")
    assert "found by all_reduce #3 (sum of 10 float64)" in str(errors[0])
    if ranks == 2:
        assert sides == "0 against rank 1"
    elif "ring" not in way:  # along a ring the other ranks receive the bad values
        assert sides == "2 has other bytes than ranks 0-1"


def test_between_processes():
    def job(c):
        c.broadcast(memory(bad=c.rank == 2))
        try:
            for _ in range(2):
                c.barrier()
        except WireMismatch as error:
            return "rank 2 has other bytes than ranks 0-1, 3" in str(error)

    assert all(run_processes(4, job, **CHECK))
    assert all(run_processes(4, job, transport="tcp", **CHECK))


def test_ranks_of_several_nodes():
    def job(c):
        c.broadcast(memory(bad=c.rank == 3))
        for _ in range(2):
            c.barrier()

    for error in attempt(4, job, transport="auto", nodes=[0, 0, 1, 1], **CHECK):
        assert verdict(error).endswith(": rank 3 has other bytes than ranks 0-2")


def test_operations_in_between_hide_nothing():
    def job(c):
        c.broadcast(memory(bad=c.rank == 1))
        c.reduce_scatter(np.ones(2), np.ones(1))

    for error in attempt(2, job, **CHECK):
        assert "found by reduce_scatter #2" in str(error)


@pytest.mark.parametrize("way", ["window", "tcp"])
def test_what_callers_name_is_compared(way):
    def job(c):
        for step in range(3):
            c.compare(f"parameters of step {step}", 7 if c.rank == step == 2 else step + 1)
            c.barrier()
        c.barrier()

    for error in attempt(4, job, **CHECK, **WAYS[way]):
        assert verdict(error) == (
            "ranks disagree on parameters of step 2: rank 2 has other bytes than ranks 0-1, 3"
        )


@each_value
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64", "int8"])
@ways
def test_equal_results_are_no_error(way, dtype):
    """Results are any bits, such as NaNs and both zeros, of sizes that divide by nothing."""

    def random(c, numel):
        rng = np.random.default_rng([c.rank, numel])
        return rng.integers(0, 256, numel * np.dtype(dtype).itemsize, "uint8").view(dtype)

    def job(c):
        n = c.size
        for numel in (0, 1, 1001, 40_003):
            for op in ("sum", "prod") if dtype == "complex64" else ("sum", "avg", "min", "max"):
                c.all_reduce(random(c, numel), op)
            c.broadcast(random(c, numel), n - 1)
            c.reduce(random(c, numel), random(c, numel), 0)
            c.all_gather(random(c, numel), random(c, numel * n))
            c.reduce_scatter(random(c, numel * n), random(c, numel))
            c.all_to_all(random(c, numel * n), random(c, numel * n))
            c.gather(random(c, numel), random(c, numel * n), 0)
            c.scatter(random(c, numel * n), random(c, numel), n - 1)
        if dtype == "float32":
            for codec in ("quant", "topk:density=0.1", "mx", "sign", "lossless"):
                c.all_reduce_coded(random(c, 5001), codec)
                c.all_gather_coded(random(c, 501), random(c, 501 * n), codec)
        c.barrier()

    for ranks in (1, 2, 3):
        run(ranks, job, **CHECK, **WAYS[way])


@pytest.mark.parametrize("way", ["window", "tcp"])
def test_without_the_check_nothing_is_compared(way):
    def job(c):
        c.compare("parameters", c.rank + 1)
        c.broadcast(memory(bad=c.rank == 1))
        c.barrier()
        return c.core.compares

    assert run(2, job, **WAYS[way]) == [False, False]


def test_the_check_sends_no_byte_more():
    def job(c):
        for numel in (1, 1000, 100_000):
            c.all_reduce(np.ones(numel))
        c.barrier()
        return c.sent_bytes()

    for way in ("window", "direct"):
        assert run(3, job, **CHECK, **WAYS[way]) == run(3, job, **WAYS[way])


def test_words_that_are_no_check_are_refused():
    with pytest.raises(Error, match='unknown check "all"; use one of none, results'):
        Communicator(None, 0, 1, check="all")
