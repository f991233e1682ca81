"""A process that dies is detected at once, and named, by every rank; also while a group is made."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost, Timeout
from tests.extent import each_pair, each_value
from tests.ranks import attempt, good, in_processes, on_processes, run_processes
from tests.soak.held import descriptors

# Seconds, as the design promises. The promise is that no wait for a dead rank lasts longer, but a
# busy machine may delay this process: the fastest of three tries counts.
NOTICED = 0.5
TRIES = 3


def until_lost(c):
    """Call until a rank is lost; return its rank, the error text, and the time."""
    try:
        c.barrier()
        while True:
            c.all_reduce(np.ones(50_000))
    except PeerLost as error:
        return error.rank, str(error), time.time()


@each_pair
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["auto", "direct"])
@pytest.mark.parametrize("state", ["in a call", "between calls"])
def test_a_killed_rank_is_named_by_all_at_once(tmp_path, transport, way, state):
    victim, ranks = 1, 3
    stamp = tmp_path / "stamp"

    def job(c):
        if c.rank != victim:
            return until_lost(c)
        c.barrier()
        if state == "in a call" and os.fork() != 0:
            c.recv(np.empty(1), 0).wait()
        elif state == "in a call":  # the child kills the parent, which waits in the call above
            time.sleep(0.1)
        stamp.write_text(repr(time.time()))
        os.kill(os.getpid() if state == "between calls" else os.getppid(), signal.SIGKILL)
        os._exit(0)

    took = []
    while len(took) < TRIES and min(took, default=NOTICED) >= NOTICED:
        first, _, third = run_processes(ranks, job, transport=transport, algo=way)
        for lost, text, _ in (first, third):
            assert lost == victim
            assert f"rank {victim}" in text
        took.append(max(first[2], third[2]) - float(stamp.read_text()))
    assert min(took) < NOTICED


def is_alive(process: int) -> bool:
    """Return whether a process lives; its first thread is a zombie before its files are closed."""
    folder = Path(f"/proc/{process}")
    try:
        dead = (folder / "stat").read_text().split()[2] == "Z"
        return not dead or len(list((folder / "task").iterdir())) > 1
    except OSError:
        return False


def test_of_two_deaths_the_first_is_named():
    """The second rank may have left because of the first."""

    def job(c):
        processes = np.zeros(3, np.int64)
        c.all_gather(np.array([os.getpid()]), processes)
        if c.rank == 0:
            while is_alive(processes[2]):
                time.sleep(0.001)
        if c.rank != 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as lost:
            c.recv(np.zeros(1), 0).wait()
        return lost.value.rank, str(lost.value)

    _, (rank, text), _ = run_processes(3, job, transport="tcp")
    assert rank == 2, text


@each_value
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["recv", "broadcast"])
def test_who_waits_for_one_of_two_dead_ranks_alone_hears_of_it(transport, call):
    """This rank needs nothing from the other dead rank, whose death is no reason to stop."""

    def job(c):
        processes = np.zeros(3, np.int64)
        c.all_gather(np.array([os.getpid()]), processes)
        if c.rank != 1:
            c.send(np.zeros(1), 1, tag=1).wait()
            c.recv(np.zeros(1), 1, tag=1).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):  # both ranks have all that they need from each other
            c.recv(np.zeros(1), tag=1).wait()
        for rank in (0, 2):
            c.send(np.zeros(1), rank, tag=1).wait()
        while is_alive(processes[0]) or is_alive(processes[2]):
            time.sleep(0.001)
        wait = {
            "recv": lambda: c.recv(np.zeros(1), 2).wait(2.0),
            "broadcast": lambda: c.broadcast(np.zeros(1), 2, timeout=2.0),
        }
        with pytest.raises(PeerLost) as lost:
            wait[call]()
        return lost.value.rank, lost.value.ranks

    _, (rank, ranks), _ = run_processes(3, job, transport=transport, algo="direct")
    assert rank in (0, 2)
    assert ranks == [0, 2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_left_before_its_process_ended_has_not_died(transport):
    def job(c):
        c.barrier()
        if c.rank == 0:
            time.sleep(0.3)  # the process of rank 1 has ended
            with pytest.raises(PeerLost, match=r"rank 1 .*left the group") as lost:
                c.all_reduce(np.ones(3))
            assert "died" not in str(lost.value)

    run_processes(2, job, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_leaves_after_the_last_call_harms_nobody(transport, ranks):
    def job(c):
        x = np.full(1000, c.rank, np.float32)
        c.all_reduce(x)
        c.broadcast(x, 0)
        time.sleep(0.02 * (c.rank > 0))
        return x[0]

    for _ in range(5):
        assert attempt(ranks, job, transport=transport) == [sum(range(ranks))] * ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_is_left_can_go_on_point_to_point(transport):
    """A rank that has done its part may leave while the others still communicate."""

    def job(c):
        x = np.zeros(1)
        if c.rank == 2:
            c.send(x, 0, tag=1).wait()
            return None
        if c.rank == 0:
            c.recv(x, tag=1).wait()
            time.sleep(0.1)
        for _ in range(10):
            if c.rank == 0:
                c.send(x + 1, 1).wait()
                c.recv(x, 1).wait()
            else:
                c.recv(x, 0).wait()
                c.send(x, 0).wait()
        return x[0]

    assert attempt(3, job, transport=transport) == [10, 10, None]


# ----------------------------------------------------------------------------------------- aborted
# What an abort means to a rank that was stopped meanwhile: in a call, or in the abort itself.


@on_processes(2)
def test_an_abort_that_follows_a_call_takes_nothing_from_it(c):
    processes = np.zeros(2, np.int64)
    c.all_gather(np.array([os.getpid()]), processes)
    if c.rank == 0:
        c.barrier()
        with pytest.raises(Error, match="a step that failed"):
            c.barrier()
        return
    time.sleep(0.5)  # the other rank is in its barrier, which lacks this one alone
    os.kill(processes[0], signal.SIGSTOP)
    c.barrier()
    c.abort("a step that failed")
    os.kill(processes[0], signal.SIGCONT)


@on_processes(2)
def test_an_abort_counts_from_its_start(c):
    """What is seen of rank 1 if it is stopped between the start of an abort and its reason."""
    if c.rank == 1:
        c.barrier()
        for number, target in descriptors().items():
            if "memfd:pycomm" in target:
                with mmap.mmap(number, mmap.PAGESIZE) as header:
                    header[:4] = (1 * 4 + 1).to_bytes(4, "little")  # its place, writing

    def calls():
        if c.rank == 0:
            c.barrier()
            time.sleep(0.5)
        c.all_reduce(np.ones(1000, np.float32))

    with pytest.raises(Error, match="rank 1 aborted the group, but its reason did not arrive"):
        calls()


# --------------------------------------------------------------------------------------- rendezvous
# Failures while a group is made: every rank gets an error at once, with the reason and the rank.


LONG = 20.0
"""Seconds after which a test fails. Groups have longer: no error may wait for their deadline."""
DEADLINE = 3 * LONG
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_death_during_the_rendezvous_is_named(tmp_path, transport):
    def job(store, rank):
        if rank == 0:
            store.get("default/here/1", LONG)
            time.sleep(0.5)  # it joins when rank 1 is dead, and still gets the error
        if rank == 1:
            threading.Timer(0.2, die).start()
        Communicator(store, rank, 3, transport=transport, timeout=DEADLINE)

    first, second, third = outcomes(tmp_path, 3, job)
    assert second is None
    for facts in (first, third):
        kind, lost, text = facts
        assert (kind, lost) == ("PeerLost", 1), text
        assert 'rank 1 died while group "default" was made: its process' in text


def test_a_group_knows_of_deaths_while_another_is_made_from_it(tmp_path):
    """Each rank acts as if on a host of its own, so no rank sees another's process."""

    def job(store, rank):
        options = {"nodes": range(3), "timeout": DEADLINE}
        world = Communicator(store, rank, 3, **options)
        world.all_reduce(np.ones(3))
        if rank == 1:
            die()
        ranks = [2, 1, 0]
        options |= {"group": "backwards", "parent": world, "parent_ranks": ranks}
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
            Communicator(store, c.rank, 3, parent=c, transport=transport, **second)
        finally:
            over.wait(LONG)

    store, second = Store.local(), {"group": "second", "timeout": DEADLINE}
    *told, silent = attempt(3, job, limit=LONG, transport=transport)
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
        Communicator(store, rank, 3, timeout=DEADLINE)

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


def test_a_parent_may_be_closed_while_a_group_is_made_from_it():
    over, store = threading.Event(), Store.local()

    def job(c):
        c.barrier()
        if c.rank == 1:
            return over.wait(LONG)
        parent = weakref.ref(c.core)
        threading.Timer(0.1, c.close).start()
        threading.Timer(0.3, lambda: lives.append(parent() is not None)).start()
        try:
            with pytest.raises(Timeout):
                Communicator(store, 0, 2, parent=c, group="second", timeout=0.8)
        finally:
            over.set()

    lives: list[bool] = []
    good(attempt(2, job))
    assert lives == [True]


def test_the_parent_must_have_these_ranks():
    world = Communicator(Store.local(), 0, 1)
    for ranks in ([0], [0, 7]):
        with pytest.raises(Error, match="parent"):
            Communicator(Store.local(), 0, 2, parent=world, parent_ranks=ranks)


def test_an_unseen_process_is_gone_or_runs_on_a_clone():
    """Clones have the same host id. The test plays rank 1; rank 2 never joins."""
    store = Store.local()
    with ThreadPoolExecutor() as ranks:
        outcome = ranks.submit(Communicator, store, 0, 3, timeout=5)
        word = store.get("default/here/0", LONG).decode()
        ours, number = f" {os.getpid()} ", 1 << 22  # larger than any pid
        assert ours in word
        store.set("default/here/1", word.replace(ours, f" {number} "))
        error = outcome.exception(LONG)
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "PYCOMM_HOST_ID" in str(error)


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
