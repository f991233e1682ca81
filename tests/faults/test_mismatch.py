"""Mismatched calls: every rank gets an error that names both calls."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost, Timeout, WireMismatch
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt, on_threads, run

ways = pytest.mark.parametrize("way", WAYS)


def ones(numel, dtype="float32"):
    return np.ones(numel, dtype)


def exact(c):
    c.all_reduce(ones(1000))


def coded(c, codec="quant", **change):
    c.all_reduce_coded(ones(1000), codec, **{"seed": 1, "step": 1} | change)


# The call of all ranks but the last one, that rank's, and a pattern of what it is in then. Large
# calls take two-shot and several segments.
CALLS = {
    "size": (exact, lambda c: c.all_reduce(ones(999)), "sum of 999 float32"),
    "large size": (exact, lambda c: c.all_reduce(ones(200_000)), "200000 float32"),
    # A ring passes nothing on of it, so this rank may be ahead.
    "no elements": (exact, lambda c: c.all_reduce(ones(0)), r"\(sum of 0 |barrier #3"),
    "dtype": (exact, lambda c: c.all_reduce(ones(1000, "int32")), "1000 int32"),
    "reduction": (exact, lambda c: c.all_reduce(ones(1000), "max"), "max of 1000"),
    "op": (exact, lambda c: c.reduce_scatter(ones(1000 * c.size), ones(1000)), "reduce_scatter"),
    # Over shared memory this call uses channels, and all_reduce uses the window.
    "way": (exact, lambda c: c.all_to_all(ones(8 * c.size), ones(8 * c.size)), "all_to_all #2"),
    "barrier": (exact, lambda c: c.barrier(), "barrier #2"),
    "codec": (coded, partial(coded, codec="sign"), "sign"),
    "codec's options": (coded, partial(coded, codec="quant:block=128"), "block=128"),
    "seed": (coded, partial(coded, seed=2), "quant:bits=8"),
    "step": (coded, partial(coded, step=2), "quant:bits=8"),
    "average": (coded, partial(coded, average=False), "sum of 1000 float32"),
}
TEXTS = {exact: "sum of 1000 float32", coded: "avg of 1000 float32, quant:bits=8"}


@each_value
@ways
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS)
def test_every_rank_is_told_who_differs(way, ranks, call):
    ours, other, word = CALLS[call]

    def job(c):
        c.barrier()
        (ours if c.rank < ranks - 1 else other)(c)
        c.barrier()

    mine = rf"in all_reduce #2 \({TEXTS[ours]}.*, last completed barrier #1"
    lines = [
        f"  {ranks_text(ranks - 1, '', '').strip()}: {mine}",
        rf"  rank {ranks - 1}( differs| is ahead)?: in .*({word}).*, last completed .*",
    ]
    if ranks > 2:  # with two ranks, neither is known to be right
        lines = [lines[1].replace("?", ""), lines[0]]
    first = r"rank \d (calls|(expects|sends) \d+ bytes of) .*"
    if call in ("seed", "step"):  # the texts of the calls are equal
        first += r" with digest \w+"
        lines = [f"  ranks 0-1: {mine}"] if ranks == 2 else lines
    for text in texts_of(attempt(ranks, job, **WAYS[way]), WireMismatch):
        assert re.fullmatch("\n".join([f"{first}, {first}", *lines]), text), text


def meet(*options: dict[str, Any]) -> list[Any]:
    """Return the outcomes of ranks that start with these options."""
    store, given = Store.local(), {"transport": "shm", "timeout": 5}

    def start(rank):
        return Communicator(store, rank, len(options), **given | options[rank])

    return on_threads(range(len(options)), start, 60)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("algo", ("direct", "ring")),
        ("transport", ("shm", "tcp")),
        ("segment_bytes", (0, 64)),
        ("nodes", ((0, 0), (0, 1))),
        ("sockets", (1, 3)),
        ("tls", ("off", "on")),
    ],
)
def test_options_that_differ_are_found_when_ranks_meet(option, values):
    common = {"transport": "tcp"} if option in ("sockets", "tls") else {}
    for error in meet(*(common | {option: value} for value in values)):
        assert isinstance(error, WireMismatch)
        for value in values:
            told = ",".join(map(str, value)) if option == "nodes" else value
            assert f"{option}={told}" in str(error)


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
        Communicator(store, 0, 2, transport="shm", timeout=5)


def test_what_need_not_be_equal():
    first = {"timeout": 5, "link": "1GB"}
    second = {"timeout": 9, "congestion": "reno"}
    for way in ({"transport": "shm"}, {"transport": "tcp"}):
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


# -------------------------------------------------------------------------------------------- texts
# Errors that end a group agree on every rank: the cause, and the state of all ranks.


ways = pytest.mark.parametrize("way", ["window", "direct", "tcp"])
all_ranks = pytest.mark.parametrize("ranks", [2, 3, 4])


def ranks_text(ranks, one, many):
    """Return "rank 0 waits" or "ranks 0-2 wait"."""
    if ranks == 1:
        return f"rank 0 {one}"
    return f"ranks 0-{ranks - 1} {many}"


def texts_of(errors, kind):
    """Return the error texts, which are equal unless several ranks detect the failure at once.

    Each of these reports it from its own view, and the other ranks get one of their texts.
    """
    errors = [error for error in errors if error is not None]
    assert errors
    assert all(type(error) is kind for error in errors)
    texts = {str(error) for error in errors}
    assert len({text.partition("\n")[2] for text in texts}) == 1  # all texts have one table
    return texts


@each_value
@ways
@all_ranks
def test_a_missing_rank(way, ranks):
    over = threading.Barrier(ranks)

    def job(c):
        c.barrier()
        try:
            if c.rank < ranks - 1:
                c.all_reduce(ones(10), timeout=0.3)
        finally:
            over.wait(10)

    call = re.escape("all_reduce #2 (sum of 10 float32)")
    for text in texts_of(attempt(ranks, job, **WAYS[way]), Timeout):
        assert re.fullmatch(
            rf"rank [0-{ranks - 2}]: {call} did not end within the timeout of 300 ms\n"
            rf"  rank {ranks - 1} is missing: in no operation, last completed barrier #1\n"
            rf"  {ranks_text(ranks - 1, 'waits', 'wait')}: in {call}, last completed barrier #1",
            text,
        )


@ways
def test_both_ends_of_a_receive_that_nobody_sends_to(way):
    def job(c):
        c.barrier()
        if c.rank == 0:
            try:
                c.recv(ones(20), 1, tag=3).wait(0.3)
            finally:
                assert c.trace()["records"][-1]["state"] == "failed"
        elif c.rank == 1:
            c.recv(ones(10), 0, tag=4).wait(10)
        else:
            c.all_reduce(ones(10))

    assert texts_of(attempt(3, job, **WAYS[way]), Timeout) == {
        "rank 0: recv of 80 bytes from rank 1 (tag 3) did not end within the timeout of 300 ms; "
        "check that the other end sends with the same tag\n"
        "  rank 0: in recv of 80 bytes from rank 1 (tag 3), last completed barrier #1\n"
        "  rank 1: in recv of 40 bytes from rank 0 (tag 4), last completed barrier #1\n"
        "  rank 2: in all_reduce #2 (sum of 10 float32), last completed barrier #1"
    }


@ways
def test_what_several_threads_of_a_rank_wait_for(way):
    """One that has what it waited for leaves the others' to be seen."""

    def job(c):
        c.barrier()
        if c.rank == 0:
            waits = [c.recv(ones(2), 1, tag=tag).wait for tag in (1, 2)]
            with ThreadPoolExecutor(2) as threads:
                first, second = map(threads.submit, waits)
                for _ in range(50):  # who posts lets either of them move bytes, and show its wait
                    c.recv(ones(2), 1, tag=4)
                    time.sleep(0.002)
                c.send(ones(2), 1, tag=5)
                first.result()
                second.result()
        c.recv(ones(2), 0, tag=5).wait()
        c.send(ones(2), 0, tag=1).wait()
        time.sleep(0.2)
        c.recv(ones(3), 0, tag=3).wait(0.3)

    for text in texts_of(attempt(2, job, **WAYS[way]), Timeout):
        assert "  rank 0: in recv of 8 bytes from rank 1 (tag 2), last completed barrier" in text


@ways
def test_what_a_rank_was_about_to_receive_from_one_that_has_left(way):
    left = threading.Event()

    def job(c):
        c.barrier()
        if c.rank == 1:
            return
        left.wait(10)
        c.recv(ones(4), 1).wait()

    threading.Timer(0.1, left.set).start()
    error, _ = attempt(2, job, **WAYS[way])
    assert (type(error), error.rank) == (PeerLost, 1)
    was = "rank 0: in recv of 16 bytes from rank 1 (tag 0), last completed barrier #1"
    assert was in str(error)
