"""Mismatched calls: every rank gets an error that names both calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, WireMismatch
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt, run

ways = pytest.mark.parametrize("way", WAYS)


def ones(numel, dtype="float32"):
    return np.ones(numel, dtype)


# The last rank's call while the others reduce 1000 float32, and a part of the error about it.
# Large calls take two-shot and several segments.
CALLS = {
    "size": (lambda c: c.all_reduce(ones(999)), "999 float32"),
    "large size": (lambda c: c.all_reduce(ones(200_000)), "200000 float32"),
    "no elements": (lambda c: c.all_reduce(ones(0)), "0 float32"),
    "dtype": (lambda c: c.all_reduce(ones(1000, "int32")), "1000 int32"),
    "reduction": (lambda c: c.all_reduce(ones(1000), "max"), "max of 1000"),
    "op": (lambda c: c.reduce_scatter(ones(1000 * c.size), ones(1000)), "reduce_scatter"),
    # Over shared memory this call uses channels, and all_reduce uses the window.
    "way": (lambda c: c.all_to_all(ones(8 * c.size), ones(8 * c.size)), "all_to_all #2"),
    "barrier": (lambda c: c.barrier(), "barrier"),
}


@each_value
@ways
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_every_rank_is_told_who_differs(way, ranks, call):
    other, word = CALLS[call]

    def job(c):
        c.all_reduce(ones(10))
        if c.rank == ranks - 1:
            other(c)
        else:
            c.all_reduce(ones(1000))
        c.barrier()

    for error in attempt(ranks, job, **WAYS[way]):
        assert isinstance(error, WireMismatch), error
        assert f"rank {ranks - 1}" in str(error)
        assert word in str(error)
        assert "all_reduce #2 (sum of 1000 float32)" in str(error)


@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
def test_a_call_that_one_rank_left_out(way):
    def job(c):
        if c.rank != 1:
            c.all_gather(ones(4), ones(4 * c.size))
        c.all_reduce(ones(4))

    for error in attempt(3, job, **WAYS[way]):
        assert isinstance(error, WireMismatch)
        assert "rank 1" in str(error)
        assert "all_gather #1" in str(error)
        assert "all_reduce #1" in str(error)


@ways
def test_roots_that_differ(way):
    def job(c):
        c.broadcast(ones(4), c.rank)
        c.barrier()  # over channels a root only sends, so it gets the error here

    for error in attempt(2, job, **WAYS[way]):
        assert isinstance(error, WireMismatch)
        assert "broadcast #1 (4 float32, root " in str(error)


def test_parts_that_differ_in_all_to_all():
    def job(c):
        counts = [3, 3] if c.rank == 0 else [4, 3]
        c.all_to_all(ones(7), ones(7), send_counts=counts, recv_counts=[3, 3])
        c.barrier()

    for error in attempt(2, job):
        assert isinstance(error, WireMismatch)
        assert "16 bytes" in str(error)


# Encoding options of a rank while the first two use {"seed": 1, "step": 1} and quant; error text.
CODED = {
    "codec": ({"codec": "sign"}, "sign"),
    "codec's options": ({"codec": "quant:block=128"}, "block=128"),
    "seed": ({"seed": 2}, "with digests"),
    "step": ({"step": 2}, "with digests"),
    "average": ({"average": False}, "sum of 1000 float32"),
}


@pytest.mark.parametrize("way", ["window", "tcp"])
@pytest.mark.parametrize("what", CODED)
def test_codings_that_differ(way, what):
    change, word = CODED[what]

    def job(c):
        how = {"codec": "quant", "seed": 1, "step": 1} | (change if c.rank == 2 else {})
        c.all_reduce_coded(ones(1000), how.pop("codec"), **how)

    for error in attempt(3, job, **WAYS[way]):
        assert isinstance(error, WireMismatch)
        assert "rank 2" in str(error)
        assert word in str(error)
        assert "all_reduce #1 (avg of 1000 float32, quant:bits=8" in str(error)


def meet(*options: dict[str, Any]) -> list[Any]:
    """Return the outcomes of ranks that start with these options."""
    store, outcomes = Store.local(), [None] * len(options)

    def start(rank):
        try:
            given = {"transport": "local", "timeout": 5} | options[rank]
            outcomes[rank] = Communicator(store, rank, len(options), **given)
        except Error as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(len(options))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize(
    ("option", "values", "words"),
    [
        ("algo", ("direct", "ring"), ("algo=direct", "algo=ring")),
        ("transport", ("local", "tcp"), ("transport=local", "transport=tcp")),
        ("check", ("none", "results"), ("check=none", "check=results")),
        ("segment_bytes", (0, 64), ("segment_bytes=0", "segment_bytes=64")),
        ("nodes", ((0, 0), (0, 1)), ("nodes=0,0", "nodes=0,1")),
    ],
)
def test_options_that_differ_are_found_when_ranks_meet(option, values, words):
    for error in meet(*({option: value} for value in values)):
        assert isinstance(error, WireMismatch)
        for word in words:
            assert word in str(error)


@pytest.mark.parametrize(
    ("option", "values", "words"),
    [
        ("sockets", (1, 3), ("sockets=1", "sockets=3")),
        ("tls", ("off", "on"), ("tls=off", "tls=on")),
    ],
)
def test_connections_that_differ_are_found_when_ranks_meet(option, values, words):
    for error in meet(*({option: value, "transport": "tcp"} for value in values)):
        assert isinstance(error, WireMismatch)
        for word in words:
            assert word in str(error)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (b"pycomm=9.9.9 wire=8 size=2 transport=local", r"9\.9\.9 \(wire 8\)"),
        (b"pycomm=VERSION wire=999 size=2", r"VERSION \(wire 999\)"),
        (b"wire=7 size=2", "wire=7"),
        (b"nonsense", "nonsense"),
    ],
)
def test_ranks_of_another_version_are_refused(theirs, named):
    store = Store.local()
    version = pycomm.__version__
    store.set("default/here/1", theirs.replace(b"VERSION", version.encode()))
    named = named.replace("VERSION", re.escape(version))
    ours = rf"rank 0 runs pycomm {re.escape(version)} \(wire \d+\)"
    with pytest.raises(WireMismatch, match=rf"^{ours}, rank 1 runs {named}; install the same ve"):
        Communicator(store, 0, 2, transport="local", timeout=5)


def test_what_need_not_be_equal():
    first = {"timeout": 5, "checksum": "payload", "link_bytes_per_second": 1e9}
    second = {"timeout": 9, "checksum": "header"}
    for way in ({"transport": "local"}, {"transport": "tcp"}):
        for outcome in meet(first | way, second | way):
            assert isinstance(outcome, Communicator), outcome


@ways
def test_bad_arguments_are_found_before_a_byte_is_sent(way):
    def job(c):
        x = ones(8)
        for call, word in [
            (lambda: c.all_reduce(x, "band"), "band has no meaning for float32"),
            (lambda: c.all_reduce(x, "median"), "unknown reduction 'median'"),
            (lambda: c.all_reduce(x[::2]), "contiguous"),
            (lambda: c.all_reduce(x.astype(">f4")), "dtype >f4"),
            (lambda: c.all_reduce(ones(8, "datetime64[s]")), "dtype 'M'"),
            (lambda: c.all_reduce(b"constant"), "bytes"),
            (lambda: c.all_reduce(17), "int"),
            (lambda: c.broadcast(x, 2), "root 2 in a group of 2"),
            (lambda: c.broadcast(x, -1), "root -1"),
            (lambda: c.all_gather(x, ones(15)), "input has 8 elements and out 15"),
            (lambda: c.all_gather(x, ones(16, "int32")), "out is int32"),
            (lambda: c.reduce(x, None, c.rank), "no buffer for 8 elements"),
            (lambda: c.all_to_all(ones(3), ones(3)), "must be a multiple of 2 ranks"),
        ]:
            with pytest.raises(Error, match=word.replace("[", r"\[")):
                call()
        c.all_reduce(x)
        return x[0]

    assert run(2, job, **WAYS[way]) == [2.0, 2.0]


@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
def test_the_first_error_stays(way):
    def job(c):
        x = ones(10 + c.rank)
        other = 1 - c.rank
        errors = []
        for call in (
            lambda: c.all_reduce(x),
            c.barrier,
            lambda: c.broadcast(x, 1),
            lambda: c.send(x, other).wait(),
        ):
            with pytest.raises(WireMismatch) as caught:
                call()
            errors.append(str(caught.value))
        first, _, table = errors[0].partition("\n")
        assert errors[1:] == [
            f"{first} (seen by rank {c.rank} in {later})\n{table}"
            for later in (
                "barrier #2",
                f"broadcast #3 ({x.size} float32, root 1)",
                f"send of {x.nbytes} bytes to rank {other} (tag 0)",
            )
        ]
        return True

    assert attempt(2, job, **WAYS[way]) == [True, True]


# ------------------------------------------------------------------------------------------ results
# Differing results are reported by the next operation, with PYCOMM_CHECK=results.
#
# Bad memory is simulated by mapping the same page twice: a write to one half of such an array
# changes the other half, so the rank ends with other bytes than it was given.


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
