"""After a failed synchronization, queued operations write into no peer's memory."""

from __future__ import annotations

import ctypes
import re
import time

import numpy as np
import pytest

import pycomm
from tests.collectives.device.jobs import SPECS, Bucket
from tests.collectives.device.ranks import run
from tests.extent import each_value

# Each rank's layout in the memory file: a page, flags, and shared data (device/peer_pointers.h).
CONTROL, FLAGS = 4096, 64 * 16 * 8


def shown(size: int) -> list[bytes]:
    """Return each rank's shared data, of the only group of this process."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:pycomm-device" in line)
    begin, end = (int(word, 16) for word in re.match(r"(\w+)-(\w+)", line).groups())
    each = (end - begin) // size
    starts = [begin + r * each + CONTROL + FLAGS for r in range(size)]
    return [ctypes.string_at(start, each - CONTROL - FLAGS) for start in starts]


@each_value
@pytest.mark.parametrize("op", ["all_reduce_coded", "reduce_scatter_coded", "all_gather_coded"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_rank_whose_peer_is_late_leaves_that_peer_s_memory_as_it_was(op, spec):
    def job(c):
        bucket = Bucket(c, [spec], c.size if op == "reduce_scatter_coded" else 1)
        out = c.put(np.zeros(bucket.data.shape[1] * c.size, np.float32))
        targets = [] if op == "all_reduce_coded" else [out.address]
        c.call("barrier")
        before = shown(c.size)
        c.call("barrier")
        if c.rank == 1:  # it synchronizes no further
            time.sleep(0.8)
            after = shown(c.size)
            with pytest.raises(pycomm.Timeout):  # reported by rank 0
                c.group.check()
            return before[1] == after[1]
        c.group.set_timeout(0.2)
        c.call(op, bucket.data.address, *targets, bucket.pieces, seed=1, step=2)
        with pytest.raises(pycomm.Timeout):
            c.group.check()
        return True

    assert run(2, job) == [True, True]
