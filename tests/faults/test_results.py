"""Ranks whose results differ are named by the next operation, with PYCOMM_CHECK=results.

A rank's memory goes bad here by a second mapping of the same page: what is written to one half of
such an array changes the other half, so the rank ends with other bytes than it was given.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
import pytest

from pycomm import _C
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, WireMismatch
from tests.collectives.ways import WAYS
from tests.ranks import attempt, run, run_processes

ways = pytest.mark.parametrize("way", WAYS)
CHECK = {"check": "results"}
PAGE = mmap.PAGESIZE // 4


def bad_memory() -> np.ndarray:
    """Two pages of float32 that are one."""
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


# What a rank calls, whose memory may be bad, and how the error calls it.
OPS = {
    "all_reduce": (lambda c, x: c.all_reduce(x), "all_reduce #2 (sum of 2048 float32)"),
    "broadcast": (lambda c, x: c.broadcast(x), "broadcast #2 (2048 float32, root 0)"),
    "all_gather": (lambda c, x: c.all_gather(part(c), x[: 600 * c.size]), "all_gather #2 (600"),
    "coded": (lambda c, x: c.all_reduce_coded(x, "quant"), "all_reduce #2 (avg of 2048 float32, int8)"),
    "coded rows": (
        lambda c, x: c.all_gather_coded(part(c), x[: 600 * c.size], "quant"),
        "all_gather #2 (avg of 600 float32, int8)",
    ),
}


@ways
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_the_rank_whose_result_differs_is_named(way, ranks, op):
    call, name = OPS[op]

    def job(c):
        c.barrier()
        call(c, memory(bad=c.rank == ranks - 1))
        c.all_reduce(np.ones(10))
        c.barrier()

    for error in attempt(ranks, job, **CHECK, **WAYS[way]):
        assert isinstance(error, WireMismatch), error
        print(error)
