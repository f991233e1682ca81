"""Tests of how a device group starts: signals end the wait, and shared memory has whole pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.preload import library

KERNEL = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

// Pages of 64 KiB, as kernels for Arm and POWER have them.
long sysconf(int what) {
  extern long __sysconf(int);
  return what == _SC_PAGESIZE && getenv("LARGE_PAGES") ? 65536 : __sysconf(what);
}
// A memory file that never gets its size: who makes it stays there, and the others wait.
int ftruncate(int fd, off_t bytes) {
  while (getenv("STUCK")) sleep(60);
  return syscall(SYS_ftruncate, fd, bytes);
}
"""
SIZES = r"""
import threading
from pathlib import Path
from pycomm import _C

store, groups, ranks = _C.Store.local(), {}, 3
def make(rank):
    options = {"timeout": 20.0, "blocks": 1, "staging_bytes": 5 * 4096, "coded_bytes": 0}
    groups[rank] = _C.DeviceGroup(store, rank, ranks, **options)
threads = [threading.Thread(target=make, args=(r,)) for r in range(ranks)]
[t.start() for t in threads]; [t.join() for t in threads]
lines = Path("/proc/self/maps").read_text().splitlines()
places = [line.split()[0].split("-") for line in lines if "pycomm-device" in line]
parts = [(int(end, 16) - int(begin, 16)) / ranks / 65536 for begin, end in places]
print(len(parts), all(part == int(part) > 0 for part in parts))
"""
WAITING = r"""
import os, signal, sys, threading
from pycomm import _C

def meet(rank): _C.DeviceGroup(_C.Store.file(sys.argv[1]), rank, 2, timeout=30.0)

maker = os.fork()
if maker == 0:
    os.environ["STUCK"] = "yes"
    meet(0)
# A shell starts its background jobs deaf to SIGINT, and these tests may be one.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try: meet(1)
except BaseException as error: print(type(error).__name__)
finally: os.kill(maker, signal.SIGKILL)
"""


@pytest.fixture
def on_kernel(tmp_path):
    """Runs a program on the kernel above; returns what it has printed."""
    kernel = library(KERNEL, tmp_path)

    def run(program, **variables):
        store = tmp_path / "store"
        store.mkdir(mode=0o700)
        ended = subprocess.run(
            [sys.executable, "-c", program, str(store)],
            env={**os.environ, "LD_PRELOAD": kernel, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def test_each_rank_shows_whole_pages(on_kernel):
    assert on_kernel(SIZES, LARGE_PAGES="yes") == "3 True\n"


def test_a_signal_ends_the_wait_for_the_file(on_kernel):
    assert on_kernel(WAITING) == "KeyboardInterrupt\n"
