"""Timeouts: those that mean "never" wait, and meaningless ones are refused."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from pycomm import _C
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error
from tests.collectives.device import ranks as device_ranks
from tests.extent import each_value
from tests.ranks import run

LONG = [3e7, 1e10, 1e300, math.inf]
NONSENSE = [-1.0, -1e-9, -1e300, -math.inf, math.nan]
WAYS = {
    "window": {"transport": "local"},
    "channels": {"transport": "local", "algo": "direct"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "auto": {"transport": "auto"},
}


@each_value
@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_late_is_waited_for(way, seconds):
    def job(c):
        x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
        for timeout in (0.0, seconds):  # the group's timeout, and one per call
            if c.rank == 1:
                time.sleep(0.1)
            c.all_reduce(x, timeout=timeout)
        c.timeout = seconds
        c.barrier()
        if c.rank == 1:
            time.sleep(0.1)
            c.send(x, 0).wait(seconds)
        else:
            c.recv(y, 1).wait(seconds)
        c.barrier()
        return x, y

    (x, y), _ = run(2, job, **{**WAYS[way], "timeout": seconds})
    assert np.array_equal(x, np.full(3, 4, np.float32))
    assert np.array_equal(y, x)


@pytest.mark.parametrize("seconds", LONG)
def test_kernels_wait_for_a_rank_that_is_late(seconds):
    def job(c):
        c.group.set_timeout(seconds)
        x = c.put(np.ones(9, np.float32))
        if c.rank == 1:
            time.sleep(0.1)
        c.call("all_reduce", x.address, 9, _C.DType.float32, _C.ReduceOp.sum)
        return x.get()

    for result in device_ranks.run(2, job, timeout=seconds):
        assert np.array_equal(result, np.full(9, 2, np.float32))


@pytest.mark.parametrize("seconds", LONG)
def test_a_store_waits_for_a_key(seconds):
    store = _C.Store.local()
    store.set("key", "value")
    assert store.get("key", seconds) == b"value"


@pytest.mark.parametrize("seconds", NONSENSE)
def test_what_is_no_time_is_refused(seconds):
    def job(c):
        x = np.ones(3, np.float32)
        for call in (
            lambda: c.all_reduce(x, timeout=seconds),
            lambda: c.barrier(timeout=seconds),
            lambda: setattr(c, "timeout", seconds),
            lambda: c.recv(x, 1 - c.rank).wait(seconds),
        ):
            with pytest.raises(Error, match=r"the timeout is .* seconds; give a number"):
                call()

    run(2, job)
    with pytest.raises(Error, match=r"the timeout is .* seconds; give a number"):
        Communicator(Store.local(), 0, 1, timeout=seconds)
    with pytest.raises(Error, match=r"the timeout is .* seconds; give a number"):
        _C.Store.local().get("key", seconds)


def test_a_group_needs_time_to_meet():
    with pytest.raises(Error, match="rank 0: the timeout of the group is 0 ms; give one"):
        Communicator(Store.local(), 0, 2, timeout=0.0)
