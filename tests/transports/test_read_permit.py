"""Yama's scope 1, Ubuntu's default: ranks name their launcher and can then read each other.

The test machine's kernel may lack Yama, so a preloaded library imitates its effect on these calls,
and a folder mounted over /proc/sys/kernel announces it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.preload import library

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
RANKS = r"""
import multiprocessing as mp, os, sys, tempfile
import numpy as np
from pycomm.communicator import Communicator, Store

def named():
    try: return int(open(f"{os.environ['YAMA']}/{os.getpid()}").read())
    except FileNotFoundError: return None

def main(rank, folder, said):
    options = {"transport": "shm", "timeout": 20}
    groups = [Communicator(Store.file(folder), rank, 3, group=g, **options) for g in "ab"]
    during = named()
    sent = []
    for c in groups:
        x = np.full(1 << 18, rank, np.float32)
        out = np.empty(3 << 18, np.float32)
        before = c.sent_bytes()
        c.gather(x, out, 0)  # parts of 1 MiB are read, not sent, where that is allowed
        sent.append(c.sent_bytes() - before)
        c.barrier()
    groups[0].close()
    still = named()
    groups[1].close()
    said.send((during == os.getppid(), sent, still == os.getppid(), named()))

if __name__ == "__main__":
    context, folder = mp.get_context("fork"), tempfile.mkdtemp()
    pipes = [context.Pipe() for _ in range(3)]
    ranks = [context.Process(target=main, args=(r, folder, pipes[r][1])) for r in range(3)]
    [r.start() for r in ranks]
    for pipe in pipes: print(pipe[0].recv())
    [r.join() for r in ranks]
"""


@pytest.fixture
def yama(tmp_path):
    """Return a function that runs a program under a Yama scope and returns its output."""
    shim = library(YAMA, tmp_path)
    (tmp_path / "named").mkdir()

    def run(program, scope):
        kernel = tmp_path / "kernel"
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
        return [eval(line) for line in ended.stdout.splitlines()]

    return run


def test_ranks_name_their_launcher_while_they_have_a_group(yama):
    small = 4096
    for during, sent, still, after in yama(RANKS, scope=1):
        assert during
        assert max(sent) < small
        assert still
        assert after == 0


def test_nobody_is_named_where_it_does_not_help(yama):
    for scope in (0, 2):
        for during, _, still, after in yama(RANKS, scope=scope):
            assert (during, still, after) == (False, False, None)


CHILDREN = r"""
import multiprocessing as mp, os, tempfile, time
from pycomm.communicator import Communicator, Store

def named():
    try: return int(open(f"{os.environ['YAMA']}/{os.getpid()}").read())
    except FileNotFoundError: return None

def group(rank, folder):
    return Communicator(Store.file(folder), rank, 2, transport="shm", timeout=20)

def main(rank, first, second, said):
    c = group(rank, first)
    if os.fork() == 0:
        own = group(rank, second)
        said.send(named())
        own.barrier()
        own.close()
        os._exit(0)
    os.wait()
    c.barrier()
    c.close()

if __name__ == "__main__":
    context, folders = mp.get_context("fork"), [tempfile.mkdtemp(), tempfile.mkdtemp()]
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=main, args=(r, *folders, pipes[r][1])) for r in range(2)]
    [r.start() for r in ranks]
    for pipe in pipes: print(pipe[0].recv() == os.getpid())
    [r.join() for r in ranks]
"""


def test_forked_children_name_the_launcher_themselves(yama):
    """What their parents have named does not hold for them."""
    assert yama(CHILDREN, scope=1) == [True, True]
