"""A meeting that cannot succeed ends at once, on every rank, with the reason and the name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost
from tests.ranks import attempt

SOON = 2.0
"""Seconds: what takes a tenth of that, on a machine that is busy with other tests."""
LONG = 20.0


def outcomes(tmp_path: Path, size: int, job) -> list[tuple[str, int | None, str] | None]:
    """Kind, rank and text of the error of `job(store, rank)` on ranks that are processes."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def main(rank: int) -> None:
        try:
            job(Store.file(str(tmp_path)), rank)
            results.put((rank, None))
        except BaseException as error:
            facts = (type(error).__name__, getattr(error, "rank", None), str(error))
            results.put((rank, facts))

    processes = [context.Process(target=main, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found: list[tuple[str, int | None, str] | None] = [None] * size
    try:
        for _ in range(size - 1):  # one of them dies
            rank, facts = results.get(timeout=LONG)
            found[rank] = facts
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_dies_after_it_has_come_is_named_while_another_is_still_awaited(
    tmp_path, transport
):
    def job(store, rank):
        if rank == 0:
            time.sleep(0.5)  # it comes late, and hears of it all the same
        if rank == 1:
            threading.Timer(0.2, die).start()
        start = time.monotonic()
        try:
            Communicator(store, rank, 3, transport=transport, timeout=LONG)
        finally:
            assert time.monotonic() - start < SOON

    first, second, third = outcomes(tmp_path, 3, job)
    assert second is None
    for facts in (first, third):
        kind, lost, text = facts
        assert (kind, lost) == ("PeerLost", 1), text
        assert 'rank 1 died while group "default" was made: its process' in text


def test_a_group_knows_of_deaths_while_another_is_made_from_it(tmp_path):
    """As if each rank was on a host of its own: nobody sees another's process."""

    def job(store, rank):
        options = {"nodes": range(3), "timeout": LONG}
        world = Communicator(store, rank, 3, **options)
        world.all_reduce(np.ones(3))
        if rank == 1:
            die()
        start = time.monotonic()
        ranks = [2, 1, 0]
        try:
            Communicator(
                store, ranks.index(rank), 3, group="backwards", parent=world, parent_ranks=ranks,
                **options,
            )  # fmt: skip
        finally:
            assert time.monotonic() - start < SOON

    first, _, third = outcomes(tmp_path, 3, job)
    for facts in (first, third):
        kind, lost, text = facts
        assert (kind, lost) == ("PeerLost", 1), text
        assert "the group that it is in already has lost it" in text


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_abort_of_the_parent_ends_the_meeting_for_all(transport):
    over = threading.Barrier(3)

    def job(c):
        try:
            c.barrier()
            if c.rank == 2:
                return  # it never comes to the second meeting
            if c.rank == 1:
                threading.Timer(0.1, c.abort, ("the user pressed stop",)).start()
            start = time.monotonic()
            try:
                Communicator(
                    STORE[0], c.rank, 3, group="second", parent=c, transport=transport, timeout=LONG
                )
            finally:
                assert time.monotonic() - start < SOON
        finally:
            over.wait(LONG)

    STORE = [Store.local()]
    *told, silent = attempt(3, job, transport=transport)
    assert silent is None
    for error in told:
        assert isinstance(error, Error), error
        assert "rank 1 was aborted after barrier #1: the user pressed stop" in str(error)


def test_a_signal_ends_the_wait_for_others_and_they_hear_of_it(tmp_path):
    def job(store, rank):
        if rank == 1:
            time.sleep(0.3)  # so that it hears of what is over already
        else:
            # A shell starts its background jobs deaf to SIGINT, and these tests may be one.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            Communicator(store, rank, 3, timeout=LONG)
        finally:
            assert time.monotonic() - start < SOON

    first, second, _ = outcomes(tmp_path, 3, lambda s, r: job(s, r) if r < 2 else time.sleep(LONG))
    assert first[0] == "KeyboardInterrupt"
    assert second[0] == "Error"
    assert "rank 0 has left the meeting" in second[2]
    assert "KeyboardInterrupt" in second[2]


def test_a_rank_that_cannot_join_tells_the_others_why():
    store, errors = Store.local(), {}

    def meet(rank):
        start = time.monotonic()
        try:
            interface = "no-such-interface" if rank == 1 else None
            Communicator(store, rank, 2, transport="tcp", interface=interface, timeout=LONG)
        except Error as error:
            errors[rank] = str(error)
        assert time.monotonic() - start < SOON

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert '"no-such-interface"' in errors[1]
    assert "rank 1 has left the meeting" in errors[0]
    assert errors[1] in errors[0]


def test_the_parent_must_have_these_ranks():
    world = Communicator(Store.local(), 0, 1)
    for ranks in ([0], [0, 7]):
        with pytest.raises(Error, match="parent"):
            Communicator(Store.local(), 0, 2, parent=world, parent_ranks=ranks)
    assert issubclass(PeerLost, Error)
