"""The shared memory transport: messages over rings, membership, and clean-up."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import Error, PeerLost, Timeout
from tests.ranks import run, run_processes
from tests.transports.ranks import processes


def test_workers_forked_from_a_rank_do_not_keep_it_alive():
    """DataLoader workers may outlive a killed trainer; its peers must not wait for them."""

    def job(me):
        if me.rank == 1:
            worker = os.fork()
            if worker == 0:
                time.sleep(3.0)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 died"):
            me.transport.run_shared(_C.OpTag("barrier"))
        assert time.monotonic() - start < 2  # the worker still sleeps

    processes(2, job)


def test_a_forked_childs_close_is_its_own():
    def job(me):
        child = os.fork()
        if child == 0:
            me.transport.close()
            os._exit(0)
        os.waitpid(child, 0)
        for seq in range(1, 4):
            me.transport.run_shared(_C.OpTag("barrier", seq=seq))

    processes(2, job)


def test_ranks_that_miss_the_rendezvous_are_all_named():
    with pytest.raises(Timeout, match=r"did not come .*: 1, 2"):
        _C.Transport("local", _C.Store.local(), "group", 0, 3, timeout=0.1)


def memfds() -> list[str]:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:  # the descriptor that listed the folder
            continue
    return [link for link in links if "memfd:pycomm" in link]


def own_doors() -> list[str]:
    """Return the names of this process's pycomm sockets, abstract or in a folder.

    Other tests run at the same time, with abstract sockets that end when their processes do.
    """
    held = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if os.path.islink(fd)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    named = [(row[6], row[7]) for row in rows if len(row) == 8 and "pycomm-" in row[7]]
    return [name for inode, name in named if name.startswith("/") or f"socket:[{inode}]" in held]


def mapped_memfds() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pycomm")


def test_nothing_is_left_behind_by_a_crash():
    doors, inherited, mapped = own_doors(), memfds(), mapped_memfds()

    def job(me):
        assert len(memfds()) > len(inherited)
        assert mapped_memfds() > 0
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            me.transport.run_shared(_C.OpTag("barrier"))
        me.transport.close()
        assert len(memfds()) <= len(inherited)
        assert mapped_memfds() <= mapped

    processes(3, job, errors=True)
    assert own_doors() == doors
    assert not [name for name in os.listdir("/dev/shm") if "pycomm" in name]


def test_shm_needs_another_rank_on_this_host():
    with pytest.raises(Error, match="rank 0 shares memory with no other rank"):
        _C.Transport("shm", _C.Store.local(), "alone", 0, 1, timeout=5.0)


def reach(me):
    return [r for r in range(3) if me.transport.reaches(r)], me.transport.has_window


def assert_third_rank_is_left_out(outcomes, *, has_window):
    assert outcomes[0] == ([1], has_window)
    assert outcomes[1] == ([0], has_window)
    assert "rank 2 shares memory with no other rank" in str(outcomes[2])


def test_a_rank_without_the_shared_region_is_left_out():
    def forbid_more_files(rank):
        if rank == 2:
            # There is room for the store's folder and a socket, not for the file passed over it.
            free = [os.dup(0), os.dup(0)]
            for descriptor in free:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[1] + 1, free[1] + 1))

    outcomes = processes(3, reach, prepare=forbid_more_files, errors=True)
    assert_third_rank_is_left_out(outcomes, has_window=False)  # it has a place in the shared region


def test_network_namespaces_are_different_hosts():
    new_network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    probe = os.fork()
    if probe == 0:
        os._exit(libc.unshare(new_network) != 0)
    if os.waitpid(probe, 0)[1] != 0:
        pytest.skip("this user may not make a network namespace")

    def move(rank):
        if rank == 2:
            assert libc.unshare(new_network) == 0

    outcomes = processes(3, reach, prepare=move, errors=True)
    assert_third_rank_is_left_out(outcomes, has_window=True)  # of the host's two ranks


# --------------------------------------------------------------------------------- closed streams
# A process may have closed its standard streams: what is printed must not reach a socket.
#
# The kernel gives the numbers 0, 1 and 2 to the next files that are opened. A library that prints a
# warning would write it to one of ours, and one that asks a question would read from it.


RANK = """
import array, os, sys
rank, folder, transport = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from pycomm.communicator import Communicator, Store
os.closerange(0, 3)
with Communicator(Store.file(folder), rank, 2, transport=transport, timeout=20) as c:
    for turn in range(3):
        x = array.array("i", (rank + i for i in range(100_003)))
        c.all_reduce(x)
        good = x.tolist() == [2 * i + 1 for i in range(100_003)]
        taken = [number for number in range(3) if os.path.lexists(f"/proc/self/fd/{number}")]
        for number in taken:
            os.write(number, b"W1126 a warning that some library prints\\n")
with open(folder + str(rank), "w") as file:
    print(good, taken, file=file)
"""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_no_file_of_ours_has_the_number_of_a_stream(transport, tmp_path):
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), store, transport])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    for rank in range(2):
        with open(store + str(rank)) as file:
            assert file.read() == "True []\n"


# ------------------------------------------------------------------------------------- core dumps
# Memory that ranks share is kept out of core dumps: 64 GiB of sparse heap for each rank.


def dumped():
    """Return each shared mapping of this process that would be in a core dump."""
    found = []
    for text in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end, access = re.match(r"(\w*)-?(\w*) ?(\S*)", text).groups()
        heaps = access.endswith("s") and int(end, 16) - int(begin, 16) >= 1 << 30
        if (heaps or "memfd:pycomm" in text) and " dd" not in text.split("VmFlags:")[1]:
            found.append(text.splitlines()[0])
    return found


def between_processes(c):
    x = np.asarray(c.allocate(1 << 20))
    x[:] = 1
    c.all_reduce(x)
    return dumped()


def test_of_ranks_that_are_processes():
    assert run_processes(2, between_processes) == [[], []]


def test_of_ranks_that_are_threads():
    def job(c):
        c.barrier()
        found = dumped()
        c.barrier()
        return found

    assert run(2, job) == [[], []]


def test_of_a_device_group():
    group = _C.DeviceGroup(_C.Store.local(), 0, 1)
    assert dumped() == []
    group.close()
