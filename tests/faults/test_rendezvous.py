"""Rendezvous failures: every rank gets an error at once, with the reason and the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost, Timeout
from tests.ranks import attempt, in_processes

SOON = 2.0
"""Seconds; ten times what is needed, since other tests may keep the machine busy."""
LONG = 20.0
ROOT = Path(__file__).parents[2]


def outcomes(tmp_path: Path, size: int, job) -> list[tuple[str, int | None, str] | None]:
    """Return kind, rank and text of the error of `job(store, rank)` on ranks that are processes."""

    def main(rank: int) -> tuple[str, int | None, str] | None:
        try:
            job(Store.file(str(tmp_path)), rank)
        except BaseException as error:
            return type(error).__name__, getattr(error, "rank", None), str(error)
        return None

    return in_processes(size, main, LONG)


@contextmanager
def soon() -> Iterator[None]:
    """Check that the block ends soon, whether it raises or not."""
    start = time.monotonic()
    try:
        yield
    finally:
        assert time.monotonic() - start < SOON


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_death_during_the_rendezvous_is_named(tmp_path, transport):
    def job(store, rank):
        if rank == 0:
            time.sleep(0.5)  # it joins late and still gets the error
        if rank == 1:
            threading.Timer(0.2, die).start()
        with soon():
            Communicator(store, rank, 3, transport=transport, timeout=LONG)

    first, second, third = outcomes(tmp_path, 3, job)
    assert second is None
    for facts in (first, third):
        kind, lost, text = facts
        assert (kind, lost) == ("PeerLost", 1), text
        assert 'rank 1 died while group "default" was made: its process' in text


def test_a_group_knows_of_deaths_while_another_is_made_from_it(tmp_path):
    """Each rank acts as if on a host of its own, so no rank sees another's process."""

    def job(store, rank):
        options = {"nodes": range(3), "timeout": LONG}
        world = Communicator(store, rank, 3, **options)
        world.all_reduce(np.ones(3))
        if rank == 1:
            die()
        ranks = [2, 1, 0]
        options |= {"group": "backwards", "parent": world, "parent_ranks": ranks}
        with soon():
            Communicator(store, ranks.index(rank), 3, **options)

    first, _, third = outcomes(tmp_path, 3, job)
    for facts in (first, third):
        kind, lost, text = facts
        assert (kind, lost) == ("PeerLost", 1), text
        assert "the group that it is in already has lost it" in text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_abort_of_the_parent_ends_the_rendezvous_for_all(transport):
    over = threading.Barrier(3)

    def abort(c):  # a parent that was aborted before could be made anew, by fewer ranks
        for rank in (0, 1):
            store.get(f"second/here/{rank}", LONG)
        c.abort("the user pressed stop")

    def job(c):
        try:
            c.barrier()
            if c.rank == 2:
                return  # it never joins the second rendezvous
            if c.rank == 1:
                threading.Thread(target=abort, args=(c,)).start()
            with soon():
                Communicator(store, c.rank, 3, parent=c, transport=transport, **second)
        finally:
            over.wait(LONG)

    store, second = Store.local(), {"group": "second", "timeout": LONG}
    *told, silent = attempt(3, job, transport=transport)
    assert silent is None
    for error in told:
        assert isinstance(error, Error), error
        assert "rank 1 was aborted after barrier #1: the user pressed stop" in str(error)


def test_a_signal_ends_the_wait_for_others_and_they_hear_of_it(tmp_path):
    def job(store, rank):
        if rank == 2:
            return  # it never joins
        if rank == 1:
            time.sleep(0.3)  # so that it learns of a failure that is already known
        else:
            # A shell starts background jobs with SIGINT ignored, and these tests may be such a job.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with soon():
            Communicator(store, rank, 3, timeout=LONG)

    first, second, _ = outcomes(tmp_path, 3, job)
    assert first[0] == "KeyboardInterrupt"
    assert second[0] == "Error"
    assert "rank 0 has left the rendezvous" in second[2]
    assert "KeyboardInterrupt" in second[2]


def test_a_rank_that_gives_up_tells_its_reason(tmp_path):
    """Its process may be gone before the others have looked for a reason again."""

    def job(store, rank):
        try:
            interface = "no-such-interface" if rank == 1 else None
            Communicator(store, rank, 2, transport="tcp", interface=interface, timeout=LONG)
        except Error:
            if rank == 1:
                die()
            raise

    for turn in range(8):
        (tmp_path / str(turn)).mkdir()
        facts, _ = outcomes(tmp_path / str(turn), 2, job)
        assert facts is not None
        assert '"no-such-interface"' in facts[2]


def test_the_parent_must_have_these_ranks():
    world = Communicator(Store.local(), 0, 1)
    for ranks in ([0], [0, 7]):
        with pytest.raises(Error, match="parent"):
            Communicator(Store.local(), 0, 2, parent=world, parent_ranks=ranks)
    assert issubclass(PeerLost, Error)


@pytest.mark.parametrize("lives", [True, False])
def test_an_unseen_process_may_run_on_a_clone(lives):
    """Clones have the same host id. The test plays rank 1; rank 2 never joins."""
    store = Store.local()
    with ThreadPoolExecutor() as ranks:
        outcome = ranks.submit(Communicator, store, 0, 3, timeout=5)
        word = store.get("default/here/0", LONG).decode()
        ours, number = f" {os.getpid()} ", 1 << 22  # larger than any pid
        assert ours in word
        store.set("default/here/1", word.replace(ours, f" {number} "))
        if lives:
            store.get("default/asked/1", LONG)
            store.set("default/alive/1", "yes")
        error = outcome.exception(LONG)
    if lives:
        assert isinstance(error, Timeout)
        assert str(error).endswith("did not come (here): 2")
    else:
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert "PYCOMM_HOST_ID" in str(error)


def test_a_rank_that_is_asked_whether_it_lives_answers():
    """The set-up is the same as above, but here the test plays the other machine."""
    store = Store.local()
    with ThreadPoolExecutor() as ranks:
        outcome = ranks.submit(Communicator, store, 0, 2, timeout=3)
        store.set("default/asked/0", "yes")
        assert store.get("default/alive/0", LONG) == b"yes"
        assert isinstance(outcome.exception(LONG), Timeout)


NAMED_HOST = """
import sys
from pycomm.communicator import Communicator, Store
with Communicator(Store.file(sys.argv[1]), int(sys.argv[2]), 2, timeout=20) as c:
    c.barrier()
    print(c.describe())
"""


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
def test_machines_have_the_names_that_they_are_given(tmp_path, names):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", NAMED_HOST, str(tmp_path), str(rank)],
            env={**os.environ, "PYCOMM_HOST_ID": name, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    for rank in ranks:
        said = rank.communicate(timeout=60)[0]
        assert ("shm" in said, "tcp" in said) == (names[0] == names[1], names[0] != names[1])


def test_a_failing_store_hides_no_error(tmp_path):
    """A rank that gives up reads the reason in the store; an error of the store says less."""
    options = {"transport": "tcp", "interface": "none0"}
    with pytest.raises(Timeout):
        Communicator(Store.file(str(tmp_path)), 0, 2, timeout=0.1, **options)
    (reason,) = tmp_path.glob("*given*up*")
    reason.unlink()
    reason.mkdir()  # that cannot be read
    with pytest.raises(Error, match="no interface fits PYCOMM_INTERFACE"):
        Communicator(Store.file(str(tmp_path)), 1, 2, timeout=LONG, **options)
