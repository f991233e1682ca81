"""Memory that ranks share is kept out of core dumps: 64 GiB of sparse heap for each rank."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pycomm import _C
from tests.ranks import run, run_processes


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
