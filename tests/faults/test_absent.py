"""A rank that never joins is named by every rank that waited for it."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from pycomm import _C
from pycomm.communicator import Communicator, Store
from pycomm.errors import Error, Timeout
from tests.collectives.device import ranks as device_ranks
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt, on_threads, run

everywhere = pytest.mark.parametrize("way", ["window", "direct", "tcp"])


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "auto"])
def test_at_the_rendezvous(transport):
    store = Store.local()

    def meet(rank):
        Communicator(store, rank, 4, transport=transport, timeout=0.3)

    for error in on_threads((0, 2), meet, 10):
        assert isinstance(error, Timeout)
        assert "rank(s) that did not come" in str(error)
        assert str(error).rstrip().endswith("1, 3")


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "auto"])
@pytest.mark.parametrize("absent", [0, 2])
def test_who_hears_of_another_s_limit_says_whose_it_is(transport, absent):
    """Rank 1 waits up to a minute, another rank a fraction of a second; a third never joins."""
    store, impatient = Store.local(), 2 - absent

    def meet(rank):
        timeout = 0.3 if rank == impatient else 60.0
        Communicator(store, rank, 3, transport=transport, timeout=timeout)

    errors = on_threads((1, impatient), meet, 30)  # half of rank 1's own limit
    for error in errors:
        assert isinstance(error, Timeout)
        assert "is not complete after 300 ms" in str(error)
        assert str(error).rstrip().endswith(f": {absent}") or f", {absent}" in str(error)
        assert "60000" not in str(error)
    assert f"rank {impatient}" in str(errors[0])


@everywhere
@pytest.mark.parametrize(("seconds", "text"), [(0.2, "200 ms"), (0.0004, "1 ms")])
def test_a_call_may_name_its_own_timeout(way, seconds, text):
    over = threading.Barrier(2)

    def job(c):
        start = time.monotonic()
        try:
            if c.rank == 0:
                c.barrier(timeout=seconds)
        finally:
            took = time.monotonic() - start
            over.wait(10)
            assert took < 2

    error, _ = attempt(2, job, **WAYS[way])
    assert isinstance(error, Timeout)
    assert f"the timeout of {text}" in str(error)


# ------------------------------------------------------------------------------------------ endless
# Timeouts: those that mean "never" wait, and meaningless ones are refused.


LONG = [3e7, 1e10, 1e300, math.inf]
NONSENSE = [-1.0, -1e-9, -1e300, -math.inf, math.nan]
EACH_WAY = {
    "window": {"transport": "local"},
    "channels": {"transport": "local", "algo": "direct"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "auto": {"transport": "auto"},
}


@each_value
@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.parametrize("way", EACH_WAY)
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

    (x, y), _ = run(2, job, **{**EACH_WAY[way], "timeout": seconds})
    assert np.array_equal(x, np.full(3, 4, np.float32))
    assert np.array_equal(y, x)


@pytest.mark.parametrize("seconds", LONG)
def test_kernels_wait_for_a_rank_that_is_late(seconds):
    def job(c):
        c.group.set_timeout(seconds)
        x = c.put(np.ones(9, np.float32))
        if c.rank == 1:
            time.sleep(0.1)
        c.call("all_reduce", x.address, x.address, 9, _C.DType.float32, _C.ReduceOp.sum)
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
