"""Invalid arguments that the Communicator refuses before a byte is sent: negative or overflowing
counts, parts that do not fit, invalid times. Each check ends with a sum, to show that the group is
still usable."""

from __future__ import annotations

import ctypes
import math
import sys
import threading

import numpy as np
import pytest

from pycomm import _C
from pycomm.communicator import Communicator, Piece
from pycomm.errors import Error
from pycomm.pieces import built
from tests.collectives.ways import WAYS
from tests.ranks import attempt, run

ways = pytest.mark.parametrize("way", WAYS)
F32 = _C.DType.float32
HUGE = [2**63 - 1, 2**62, 2**62 + 1, 2**61 + 3]  # times four they are small, or negative


def works(c: Communicator) -> None:
    x = np.ones(3, np.float32)
    c.all_reduce(x)
    assert x.tolist() == [c.size] * 3


@ways
def test_counts_that_are_negative_or_wrap(way):
    def job(c):
        around_in, around_out = np.full(6000, 5.0), np.zeros(6000)
        given, out = around_in[2000:2002], around_out[2000:2002]
        for counts in ([-1, 3], [3, -1], [2**63, 2 - 2**63], [2**64 - 1, 3], [1.0, 1.0], [None, 2]):
            with pytest.raises(Error, match="all_to_all: input"):
                c.all_to_all(given, out, send_counts=counts, recv_counts=counts)
            with pytest.raises(Error, match="all_to_all: out"):
                c.all_to_all(given, out, send_counts=[1, 1], recv_counts=counts)
        for numel in (-1, 2**63, 2**64, 2**64 + 1, 1.5, "4", None):
            with pytest.raises(Error, match="allocate: numel"):
                c.allocate(numel)
        for numel in HUGE:
            with pytest.raises(Error, match=r"no memory holds|heap of this rank is"):
                c.allocate(numel, "float64")
        assert not around_out.any()
        works(c)

    run(2, job, **WAYS[way])


@ways
def test_addresses_with_sizes_that_no_memory_holds(way):
    def job(c):
        x = np.ones(64, np.float32)
        at, core, total = x.ctypes.data, c.core, _C.ReduceOp.sum
        peer = 1 - c.rank
        for n in HUGE:
            parts = _C.Parts([(at, n), (at, n)])
            for call in (
                lambda n=n: core.all_reduce(at, n, F32, total),
                lambda n=n: core.reduce_scatter(at, at, n, F32, total),
                lambda parts=parts: core.reduce_scatter(parts, at, F32, total),
                lambda n=n: core.all_gather(at, at, n, F32),
                lambda parts=parts: core.all_gather(at, parts, F32),
                lambda parts=parts: core.all_to_all(parts, parts, F32),
                lambda n=n: core.broadcast(at, n, F32, 0),
                lambda n=n: core.reduce(at, at, n, F32, total, 0),
                lambda n=n, parts=parts: core.gather(at, n, parts, F32, 0),
                lambda n=n, parts=parts: core.scatter(parts, at, n, F32, 0),
                lambda n=n: core.send(at, 4 * n, peer, 0),
                lambda n=n: core.recv(at, 4 * n, peer, 0),
            ):
                with pytest.raises((Error, TypeError), match=r"memory|incompatible"):
                    call()
        # Each part fits, but their sum overflows.
        for n in (2**60, 2**61 - 1):
            parts = _C.Parts([(at, n), (at, n)])
            with pytest.raises(Error, match="memory"):
                core.all_gather(at, parts, F32)
            with pytest.raises(Error, match="memory"):
                core.all_gather(at, at, n, F32)
        # The end of the buffer lies before its start.
        with pytest.raises(Error, match="memory"):
            core.all_reduce(2**64 - 64, 2**40, F32, total)
        works(c)

    run(2, job, **WAYS[way])


def test_pieces_that_wrap():
    codec = built("quant:bits=8", 8)
    assert codec.numel == 8
    pieces = _C.Pieces()
    spec = _C.Codec("quant:bits=8")
    pieces.add(8, spec)
    for numel in (2**64 - 8, 2**63, 2**61):
        with pytest.raises(Error, match="no memory holds"):
            pieces.add(numel, spec)
    assert pieces.numel == 8

    def job(c):
        x = np.ones(8, np.float32)
        with pytest.raises(Error, match=r"cover|elements"):
            c.all_reduce_coded(x, [Piece(4, "quant:bits=8"), Piece(8, "quant:bits=8")])
        many = _C.Pieces()
        many.add(2**60, spec)
        for call in (
            lambda: c.core.reduce_scatter_coded(x.ctypes.data, x.ctypes.data, many),
            lambda: c.core.all_gather_coded(x.ctypes.data, x.ctypes.data, many),
        ):
            with pytest.raises(Error, match="memory"):
                call()
        works(c)

    run(8, job)


@ways
def test_a_list_that_is_wrong_for_one_rank_raises_on_all(way):
    def job(c):
        def sized(*sizes):
            return [np.zeros(n, np.float32) for n in sizes]

        one = np.ones(1, np.float32)
        with pytest.raises(Error, match=r"part of 2 elements for rank 1 .* rank 1 brings 1"):
            c.all_gather(one, sized(1, 2, 1))
        with pytest.raises(Error, match=r"part of 3 elements for rank 0 .* rank 0 brings 1"):
            c.reduce_scatter(sized(3, 1, 1), one)
        for wrong in (
            lambda: c.all_gather(one, sized(2, 2, 2)),
            lambda: c.reduce_scatter(sized(2, 2, 2), one),
            lambda: c.all_gather(np.ones(1), sized(1, 1, 1)),
            lambda: c.reduce_scatter(sized(1, 1, 1), np.ones(1)),
        ):
            with pytest.raises(Error, match=r"all_gather|reduce_scatter"):
                wrong()
        works(c)

    run(3, job, **WAYS[way])


def test_times_that_are_none():
    def job(c):
        x = np.ones(2, np.float32)
        for seconds in (-1.0, math.nan, -math.inf, -1e-9):
            with pytest.raises(Error, match="timeout"):
                c.all_reduce(x, timeout=seconds)
            with pytest.raises(Error, match="timeout"):
                c.timeout = seconds
        c.timeout = math.inf
        assert c.timeout > 1e9
        c.timeout = 20.0
        works(c)

    run(2, job)


def test_buffers_say_what_they_are():
    class Lying(bytearray):
        dtype = "float64"

    def job(c):
        floats = (ctypes.c_float * 4)(1, 2, 3, 4)
        c.all_reduce(floats)
        assert list(floats) == [2, 4, 6, 8]
        for kind in (ctypes.c_int32, ctypes.c_uint8, ctypes.c_int64, ctypes.c_double):
            numbers = (kind * 3)(1, 2, 3)
            c.all_reduce(numbers)
            assert list(numbers) == [2, 4, 6]
        other = ">" if sys.byteorder == "little" else "<"
        swapped = ctypes.c_float.__ctype_be__ if other == ">" else ctypes.c_float.__ctype_le__
        with pytest.raises(Error, match="dtype"):
            c.all_reduce((swapped * 4)(1, 2, 3, 4))
        with pytest.raises(Error, match="dtype"):
            c.all_reduce(np.ones(3, other + "f4"))
        with pytest.raises(Error, match="items of 1 bytes"):
            c.all_reduce(Lying(32))
        works(c)

    run(2, job)


@ways
@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
def test_a_part_that_only_one_rank_sees_to_be_wrong_ends_the_wait_of_all(way, name):
    over = threading.Event()

    def job(c):
        at, core = np.zeros(8, np.float32).ctypes.data, c.core
        sizes = [(at, 2), (at, 1), (at, 1)] if c.rank == 0 else [(at, 1)] * 3
        ones = [(at, 1)] * 3
        try:
            if name == "all_to_all":
                core.all_to_all(_C.Parts(ones), _C.Parts(sizes), F32)
            elif name == "gather":
                core.gather(at, 1, _C.Parts(sizes), F32, 0)
            else:
                core.scatter(_C.Parts(sizes), at, 1, F32, 0)
            c.barrier()
        finally:
            over.set() if c.rank else over.wait(10)  # rank 0 neither goes on nor leaves

    own, *others = attempt(3, job, **WAYS[way])
    assert "has " in str(own)
    for error in others:
        assert isinstance(error, Error)
        assert f"rank 0 was aborted: its {name} has " in str(error)
