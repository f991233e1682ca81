"""Keeps the processors of this machine from falling asleep while something is measured.

    python awake.py PARENT

A processor that has nothing to do halts, and in a virtual machine it takes long to come back: so do
the timers of the kernel's token buckets, and a link of 10 Gbit/s carries half of its rate while
nothing is busy. This is one process per core that is never idle, and never in the way: under
SCHED_IDLE the kernel runs it only where nobody else wants to run. It ends with the process PARENT
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from itertools import repeat

PR_SET_PDEATHSIG = 1


def stay(core: int, parent: int) -> None:
    """Runs on a core for ever, at the lowest priority there is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    deque(repeat(None), maxlen=0)  # for ever, and in C


def main() -> None:
    parent, own = int(sys.argv[1]), os.getpid()
    first, *others = sorted(os.sched_getaffinity(0))
    for core in others:
        if os.fork() == 0:
            stay(core, own)
            os._exit(0)
    stay(first, parent)


if __name__ == "__main__":
    main()
