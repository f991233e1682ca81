"""Busy processes that keep the processors of this machine from idling during a measurement.

    python busy_cores.py PARENT

An idle processor halts, and in a virtual machine it takes long to wake up. The timers of the
kernel's token buckets then fire late, and a link of 10 Gbit/s carries half of its rate while
nothing is busy. This program runs one process per core that is never idle. Under SCHED_IDLE the
kernel runs it only when no other process wants the core. It ends with the process PARENT
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
    """Spin on a core forever, at the lowest priority there is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    deque(repeat(None), maxlen=0)  # an endless loop in C


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
