"""The shared heap where the kernel's pages have 64 KiB (Arm, POWER)."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.preload import library

KERNEL = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

// What such a kernel answers, and what it does to ranges that are not whole pages.
static const size_t kPage = 65536;
long sysconf(int what) {
  static long (*real)(int);
  if (what == _SC_PAGESIZE) return kPage;
  extern long __sysconf(int);
  return __sysconf(what);
}
int madvise(void* begin, size_t bytes, int advice) {
  if (advice == MADV_REMOVE) {
    if ((uintptr_t)begin % kPage) { errno = EINVAL; return -1; }
    bytes = (bytes + kPage - 1) / kPage * kPage;
  }
  return syscall(SYS_madvise, begin, bytes, advice);
}
"""
HEAP = r"""
import sys, threading
import numpy as np
from pycomm.communicator import Communicator, Store

store, group = Store.local(), {}
def make(rank): group[rank] = Communicator(store, rank, 2, transport="local")
threads = [threading.Thread(target=make, args=(r,)) for r in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
c = group[0]

def block(bytes):
    array = np.asarray(c.allocate(bytes, "uint8"))
    array[:] = 1
    return array

random = np.random.default_rng(1)
for _ in range(6):
    around = [block(int(n)) for n in random.integers(1, 200000, 8)]
    large = np.asarray(c.allocate((300 << 20) + int(random.integers(0, 65536)), "uint8"))
    behind = block(4096)  # in use, right behind it
    del large  # more than the heap keeps: its pages go back
    assert behind.all() and all(array.all() for array in around)
    assert not behind.size > 65536 or behind.ctypes.data % 65536 == 0
print("whole")
"""


def test_memory_in_use_is_kept_when_its_neighbour_is_freed(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", HEAP],
        env={**os.environ, "LD_PRELOAD": library(KERNEL, tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout == "whole\n", ended.stderr
