"""A member that is killed in the middle of `reconfigure` is named long before the deadline.

    LD_PRELOAD=kernel.so python -m tests.torch.elastic.test_killed_while_forming tcp,1,5,6,7 shm,1,2

Three processes form a group; the one that is to be rank 1 is killed by SIGKILL at its fifth, sixth
and seventh call, by the library that `KERNEL` is the source of; and so on for each case. The other
two must name it, in `reconfigure` or in the first operation, and then form a group without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

import pycomm
from tests.compiling import library
from tests.extent import part
from tests.faults.injection.case import ELASTIC, draw
from tests.faults.injection.judge import breaches
from tests.faults.injection.play import play
from tests.torch.elastic.member import LIMIT, Member
from tests.torch.harness import check_sum
from tests.torch.interpreter import ROOT

KERNEL = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

static int left;
void die_at(int call) { left = call; }
static void count(void) {
  if (__atomic_load_n(&left, __ATOMIC_SEQ_CST) > 0 &&
      __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST) == 0)
    kill(getpid(), SIGKILL);
}
#define COUNTED(type, name, parameters, arguments) \
  type name parameters { \
    count(); \
    return ((type (*) parameters)dlsym(RTLD_NEXT, #name)) arguments; \
  }
COUNTED(int, connect, (int fd, const struct sockaddr* to, socklen_t size), (fd, to, size))
COUNTED(int, listen, (int fd, int backlog), (fd, backlog))
COUNTED(ssize_t, send, (int fd, const void* from, size_t size, int flags), (fd, from, size, flags))
COUNTED(ssize_t, sendmsg, (int fd, const struct msghdr* message, int flags), (fd, message, flags))
COUNTED(int, memfd_create, (const char* name, unsigned flags), (name, flags))
"""
SIZE = 3


def take_part(rank: int, path: str, transport: str, killed: int, call: int) -> None:
    member = Member(rank, SIZE, dist.FileStore(path, SIZE), transport=transport)
    handles = member.handles("all")
    if rank == killed:
        ctypes.CDLL(None).die_at(call)

    def form_and_use() -> None:
        member.form(1, handles)
        if rank == killed:  # it makes fewer calls than that
            os.kill(os.getpid(), signal.SIGKILL)
        check_sum()

    with pytest.raises(pycomm.PeerLost) as caught:
        form_and_use()
    assert caught.value.rank == killed
    rest = [handle for r, handle in enumerate(handles) if r != killed]
    pycomm.elastic.reconfigure(2, rest, timeout=LIMIT)
    check_sum()
    dist.destroy_process_group()


def main(transport: str, killed: int, calls: list[int]) -> None:
    for call in calls:
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for rank in range(SIZE):
                process = os.fork()
                if process == 0:
                    take_part(rank, str(Path(folder) / "store"), transport, killed, call)
                    os._exit(0)  # without the end of the interpreter, which takes a second
                processes.append(process)
            ends = [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in processes]
        want = [-signal.SIGKILL if rank == killed else 0 for rank in range(SIZE)]
        assert ends == want, f"{transport}: rank {killed} killed at its call {call}: {ends}"


CALLS = range(1, 25)
# A transport, and the rank that is killed. After its fifth call, where the sample begins, it may
# have joined already.
CASES = ("shm", 1), ("tcp", 2), ("tcp", 0)


@pytest.mark.timeout(600)
def test_a_member_killed_at_any_call_is_named(tmp_path):
    """At a timeout they would raise `Timeout`; the deadline is twenty seconds."""
    command = ["-m", __name__]
    for transport, killed in CASES:
        calls = part(CALLS, 12, offset=4)
        command.append(",".join(map(str, [transport, killed, *calls])))
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": library(KERNEL, tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------------------------- random faults
# A sample of the random faults while members change; `make soak` plays more of them.


FAULTS = ("kill", "stop", "kill2")


@pytest.mark.parametrize(("phase", "fault"), list(zip(ELASTIC, FAULTS, strict=True)))
def test_a_fault_while_members_change_is_told(phase, fault):
    case = draw(7, 2, transports=["shm", "tcp"], faults=[fault], phases=[phase])
    assert case.phase == phase
    played = play(case)
    assert breaches(played) == [], f"{case}\n{played.stacks}"


if __name__ == "__main__":
    for case in sys.argv[1:]:
        transport, killed, *calls = case.split(",")
        main(transport, int(killed), list(map(int, calls)))
