"""The shared memory transport: messages over rings, membership, and clean-up."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pycomm import _C, _test
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, PeerLost
from tests.compiling import library
from tests.ranks import in_processes, on_processes
from tests.soak.held import descriptors
from tests.transports.ranks import processes, tag


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_workers_forked_from_a_rank_do_not_keep_it_alive(kind):
    """DataLoader workers may outlive a killed trainer; its peers must not wait for them."""
    reader, writer = os.pipe()
    waits = {
        "shm": lambda me: me.transport.barrier(),
        "tcp": lambda me: me.wait(me.recv(1, 100, tag())[0]),
    }

    def job(me):
        if me.rank == 1:
            if os.fork() == 0:
                os.read(reader, 1)  # until the test ends
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"rank 1 .*died"):
            waits[kind](me)

    processes(2, job, kind=kind)
    os.write(writer, b"x")


def memfds() -> list[str]:
    return [link for link in descriptors().values() if "memfd:pycomm" in link]


def own_doors() -> list[str]:
    """Return the names of this process's pycomm sockets, abstract or in a folder.

    Other tests run at the same time, with abstract sockets that end when their processes do.
    """
    held = set(descriptors().values())
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
            me.transport.barrier()
        me.transport.close()
        assert len(memfds()) <= len(inherited)
        assert mapped_memfds() <= mapped

    processes(3, job)
    assert own_doors() == doors
    assert not [name for name in os.listdir("/dev/shm") if "pycomm" in name]


def test_shm_needs_another_rank_on_this_host():
    with pytest.raises(Error, match="rank 0 shares memory with no other rank"):
        _test.Transport("shm", _C.Store.local(), "alone", 0, 1, timeout=5.0)


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


@on_processes(2)
def test_of_a_group(c):
    x = np.asarray(c.allocate(1 << 20))
    x[:] = 1
    c.all_reduce(x)
    assert dumped() == []


def test_of_a_device_group():
    group = _test.DeviceGroup(_C.Store.local(), 0, 1)
    assert dumped() == []
    group.close()


# -------------------------------------------------------------------------------------- read permit
# Yama's scope 1, Ubuntu's default: ranks name their launcher and can then read each other.
#
# The test machine's kernel may lack Yama, so a preloaded library imitates its effect on these
# calls, and a folder mounted over /proc/sys/kernel announces it.


YAMA = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void place(char* path, int process) {
  sprintf(path, "%s/%d", getenv("YAMA"), process);
}
int prctl(int what, ...) {
  va_list rest;
  va_start(rest, what);
  long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
  long d = va_arg(rest, long);
  va_end(rest);
  if (what != 0x59616d61) return syscall(SYS_prctl, what, a, b, c, d);
  char path[4096];
  place(path, getpid());
  FILE* file = fopen(path, "w");
  fprintf(file, "%ld", a);
  fclose(file);
  return 0;
}
static int parent(int process) {
  char path[64], line[1024];
  sprintf(path, "/proc/%d/stat", process);
  FILE* file = fopen(path, "r");
  if (!file) return 0;
  line[fread(line, 1, sizeof line - 1, file)] = 0;
  fclose(file);
  int id = 0;
  sscanf(strrchr(line, ')') + 2, "%*c %d", &id);
  return id;
}
ssize_t process_vm_readv(pid_t process, const struct iovec* to, unsigned long n,
                         const struct iovec* from, unsigned long m, unsigned long flags) {
  char path[4096];
  long named = 0;
  place(path, process);
  FILE* file = fopen(path, "r");
  if (file) { if (fscanf(file, "%ld", &named) != 1) named = 0; fclose(file); }
  int allowed = process == getpid();
  for (int one = getpid(); one > 0 && !allowed; one = parent(one)) {
    allowed = named > 0 && one == named;
  }
  if (!allowed) { errno = EPERM; return -1; }
  return syscall(SYS_process_vm_readv, process, to, n, from, m, flags);
}
"""


def named() -> int | None:
    """Return the process that this one has named last."""
    file = Path(os.environ["YAMA"], str(os.getpid()))
    return int(file.read_text()) if file.exists() else None


def three_ranks(folder: str) -> list[tuple[bool, list[int], bool, int | None]]:
    """Return for each rank whether it names its launcher while it has a group, and then no more."""

    def main(rank):
        options = {"transport": "shm", "timeout": 20}
        groups = [Communicator(Store.file(folder), rank, 3, group=g, **options) for g in "ab"]
        during, sent = named(), []
        for c in groups:
            before = c.sent_bytes()
            # Parts of 1 MiB are read, not sent, where that is allowed.
            c.gather(np.full(1 << 18, rank, np.float32), np.empty(3 << 18, np.float32), 0)
            sent.append(c.sent_bytes() - before)
            c.barrier()
        groups[0].close()
        still = named()
        groups[1].close()
        return during == os.getppid(), sent, still == os.getppid(), named()

    return in_processes(3, main, 60.0)


def children_of_ranks(folder: str) -> list[bool]:
    """Return whether children that ranks fork name the ranks' launcher for groups of their own."""

    def group(rank, name):
        return Communicator(Store.file(folder), rank, 2, group=name, transport="shm", timeout=20)

    def main(rank):
        reader, writer = os.pipe()
        c = group(rank, "parents")
        if os.fork() == 0:
            own = group(rank, "children")
            os.write(writer, str(named()).encode())
            own.barrier()
            own.close()
            os._exit(0)
        os.wait()
        c.barrier()
        c.close()
        return int(os.read(reader, 100)) == os.getppid()

    return in_processes(2, main, 60.0)


@pytest.fixture
def yama(tmp_path):
    """Return a function that runs one of the above under a Yama scope and returns its result."""
    shim = library(YAMA, tmp_path)
    (tmp_path / "named").mkdir()

    def run(function, scope):
        kernel = tmp_path / "kernel"
        store = tempfile.mkdtemp(dir=tmp_path)
        program = f"from {__name__} import {function.__name__} as run; print(run({store!r}))"
        (kernel / "yama").mkdir(parents=True, exist_ok=True)
        (kernel / "yama" / "ptrace_scope").write_text(f"{scope}\n")
        ended = subprocess.run(
            [
                *("unshare", "--mount", "sh", "-ec"),
                'mount --bind "$0" /proc/sys/kernel; LD_PRELOAD="$1" exec "$2" -c "$3"',
                *(str(kernel), shim, sys.executable, program),
            ],
            env={**os.environ, "YAMA": str(tmp_path / "named")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if "mount:" in ended.stderr or "unshare:" in ended.stderr:
            pytest.skip("this user may not mount anything")
        assert ended.returncode == 0, ended.stderr
        return ast.literal_eval(ended.stdout)

    return run


def test_ranks_name_their_launcher_while_they_have_a_group(yama):
    small = 4096
    for during, sent, still, after in yama(three_ranks, scope=1):
        assert during
        assert max(sent) < small
        assert still
        assert after == 0


def test_nobody_is_named_where_it_does_not_help(yama):
    for scope in (0, 2):
        for during, _, still, after in yama(three_ranks, scope=scope):
            assert (during, still, after) == (False, False, None)


def test_forked_children_name_the_launcher_themselves(yama):
    """What their parents have named does not hold for them."""
    assert yama(children_of_ranks, scope=1) == [True, True]
