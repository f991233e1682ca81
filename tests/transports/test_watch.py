"""Failure detection by the kernel: it survives closed descriptors and reused pids."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost
from tests.ranks import in_processes, on_processes, refuse, run_processes
from tests.soak.held import descriptors


def ours():
    """Return the descriptors of a group over shared memory."""
    return [fd for fd, link in descriptors().items() if "memfd:pycomm" in link or "pidfd" in link]


def go_on(c):
    for n in (10, 100_000):
        x = np.full(n, c.rank + 1, np.float32)
        c.all_reduce(x)
        assert set(x.tolist()) == {3.0}


def describe(c):
    go_on(c)
    return c.describe()


def lost(c, victim=1):
    """Wait for a rank that has died; return the error text. Otherwise it is a Timeout."""
    with pytest.raises(PeerLost, match=f"rank {victim} died") as error:
        c.barrier()
    return str(error.value).splitlines()[0]


@on_processes(2)
def test_who_closes_a_twin_of_a_descriptor_lives(c):
    if c.rank == 1:
        for fd, link in descriptors().items():
            if "memfd:pycomm" in link:
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    time.sleep(0.3)
    go_on(c)


@on_processes(2)
def test_a_rank_goes_on_without_descriptors(c):
    reader, writer = os.pipe()
    os.write(writer, b"something to read")
    closed = ours()
    assert closed
    for fd in closed:
        os.close(fd)
    for fd in closed:  # other files, which are ready, under the same numbers
        os.dup2(reader, fd)
    go_on(c)
    time.sleep(0.3)
    go_on(c)
    x = np.asarray(c.allocate(100_000))
    x[:] = c.rank + 1
    c.all_reduce(x)
    assert set(x.tolist()) == {3.0}
    c.barrier()
    c.close()
    assert all("pipe" in os.readlink(f"/proc/self/fd/{fd}") for fd in closed)


def process_is_gone(texts):
    assert "its process is gone" in texts[0]


@on_processes(2, then=process_is_gone)
def test_a_death_is_seen_without_descriptors(c):
    for fd in ours():
        os.close(fd)
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lost(c)


@on_processes(2, then=process_is_gone)
def test_a_death_is_seen_behind_other_files(c):
    reader, _writer = os.pipe()
    for fd in ours():  # other files, which are never ready, under the same numbers
        os.dup2(reader, fd)
    c.barrier()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lost(c)


@on_processes(2)
def test_memory_is_taken_back_without_descriptors(c):
    """Fail in place while the file of the heap is out of reach."""
    x = np.asarray(c.allocate(100_000))
    x[:] = 5
    for fd in ours():
        os.close(fd)
    if c.rank == 1:
        time.sleep(1.0)
        with pytest.raises(Error):
            c.all_reduce(x)
        return
    with pytest.raises(Error):
        c.all_reduce(x, timeout=0.3)
    assert set(x.tolist()) == {5.0}
    x[:] = 6
    time.sleep(1.0)
    assert set(x.tolist()) == {6.0}


def run_another_program(c):
    if c.rank == 1:
        os.execv(
            sys.executable,
            [sys.executable, "-c", "import sys, time; time.sleep(10); sys.exit(3)"],
        )
    return lost(c)


def test_who_becomes_another_program_is_lost():
    assert "exec()" in run_processes(2, run_another_program)[0]


@on_processes(2)
def test_a_crash_that_dumps_core_is_seen(c):
    os.chdir(tempfile.gettempdir())
    small = 1 << 20
    resource.setrlimit(resource.RLIMIT_CORE, (small, small))
    if c.rank == 1:
        os.abort()
    assert "rank 1 died" in lost(c)


def without_pidfd(rank):
    refuse(434, errno.ENOSYS)  # pidfd_open, as in an older kernel


@on_processes(2, then=process_is_gone, prepare=without_pidfd)
def test_a_death_is_seen_where_there_are_no_pidfds(c):
    go_on(c)
    assert pidfds() == 0
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # a zombie, since its parent has not waited for it yet
    return lost(c)


def rank_of_a_container(folder, rank):
    c = Communicator(Store.file(folder), rank, 2, timeout=20)
    if rank == 0:
        print(describe(c), flush=True)
    else:
        go_on(c)
        os._exit(3)  # process 1 of a namespace cannot kill itself
    print(lost(c), flush=True)


@pytest.mark.parametrize("first", ["beside", "around"])
def test_ranks_of_different_pid_namespaces_use_tcp(tmp_path, first):
    """They could not see each other die. Rank 0 is in a container of its own, or in none."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"]).returncode != 0:
        pytest.skip("this user may not make a PID namespace")
    code = "import sys; from tests.transports.test_watch import rank_of_a_container as rank; "
    code += "rank(sys.argv[1], int(sys.argv[2]))"
    ranks = [
        subprocess.Popen(
            [*inside, sys.executable, "-c", code, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, inside in enumerate(([] if first == "around" else unshare, unshare))
    ]
    texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert texts[1] == ""
    assert texts[0].startswith("2 ranks: tcp to 1")
    assert "rank 1 (127.0.0.1:" in texts[0]
    assert " died: " in texts[0]


def rank_of_a_sandbox(folder, rank):
    c = Communicator(Store.file(folder), rank, 2, transport="shm", timeout=20)
    go_on(c)
    time.sleep(0.5)  # time for closer looks
    go_on(c)
    c.close()
    sys.stdout.write(f"{int(os.readlink('/proc/self')) == os.getpid()}\n")


SANDBOX = """
"$0" -c "$1" "$2" 0 &
unshare --mount sh -ec 'mount -t proc proc /proc; exec "$0" -c "$1" "$2" 1' "$0" "$1" "$2" &
wait
"""


def test_another_namespaces_proc_proves_no_death(tmp_path):
    """Both ranks are in one PID namespace, but one has the /proc of the namespace around it."""
    unshare = ["unshare", "--pid", "--fork", "--mount", "sh", "-ec"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"]).returncode != 0:
        pytest.skip("this user may not make namespaces")
    code = "import sys; from tests.transports.test_watch import rank_of_a_sandbox as rank; "
    code += "rank(sys.argv[1], int(sys.argv[2]))"
    ranks = [*unshare, SANDBOX, sys.executable, code, str(tmp_path)]
    ended = subprocess.run(ranks, capture_output=True, text=True, timeout=60)
    assert sorted(ended.stdout.split()) == ["False", "True"], ended.stderr


def test_a_group_over_shared_memory_needs_no_proc():
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/proc"]).returncode:
        pytest.skip("this user may not mount anything")
    code = "from tests.ranks import run_processes; from tests.transports.test_watch import describe"
    code += '; print(*run_processes(2, describe, transport="auto"))'
    mount = 'mount -t tmpfs none /proc; exec "$0" -c "$1"'
    ranks = ["unshare", "--mount", "sh", "-ec", mount, sys.executable, code]
    ended = subprocess.run(ranks, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "2 ranks: shm with 1 2 ranks: shm with 0\n", ended.stderr


def limited(rank):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 30, 100 << 30))


@on_processes(2, prepare=limited)
def test_a_limit_of_file_sizes_takes_the_heaps_only(c):
    go_on(c)
    x = np.asarray(c.allocate(100_000))  # ordinary memory
    x[:] = c.rank + 1
    c.all_reduce(x)
    assert set(x.tolist()) == {3.0}
    assert "shm with" in c.describe()
    assert "ulimit -f" in c.describe()


def pidfds():
    return sum("pidfd" in link for link in descriptors().values())


def test_groups_share_the_descriptor_of_a_peer(tmp_path):
    def main(rank):
        store = Store.file(str(tmp_path))
        groups = [Communicator(store, rank, 2, transport="shm", group=str(i)) for i in range(4)]
        for c in groups:
            go_on(c)
        shared = pidfds()
        for c in groups:
            c.barrier()
        for c in groups:
            c.close()
        return shared - before, pidfds() - before

    before = pidfds()
    assert in_processes(2, main, 60.0) == [(1, 0)] * 2
