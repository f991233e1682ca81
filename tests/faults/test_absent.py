"""A rank that never joins is named by every rank that waited for it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Timeout
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt

everywhere = pytest.mark.parametrize("way", ["window", "direct", "tcp"])


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "auto"])
def test_at_the_rendezvous(transport):
    store, errors = Store.local(), []

    def meet(rank):
        try:
            Communicator(store, rank, 4, transport=transport, timeout=0.3)
        except Timeout as error:
            errors.append(str(error))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 2
    for error in errors:
        assert "rank(s) that did not come" in error
        assert error.rstrip().endswith("1, 3")


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "auto"])
@pytest.mark.parametrize("absent", [0, 2])
def test_who_hears_of_another_s_limit_says_whose_it_is(transport, absent):
    """Rank 1 waits up to a minute, another rank a fraction of a second; a third never joins."""
    store, errors = Store.local(), {}
    impatient = 2 - absent

    def meet(rank):
        try:
            timeout = 0.3 if rank == impatient else 60.0
            Communicator(store, rank, 3, transport=transport, timeout=timeout)
        except Timeout as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, impatient)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)  # half of its own limit
    for error in (errors[1], errors[impatient]):
        assert "is not complete after 300 ms" in error
        assert error.rstrip().endswith(f": {absent}") or f", {absent}" in error
        assert "60000" not in error
    assert f"rank {impatient}" in errors[1]


CALLS = {
    "all_reduce": lambda c: c.all_reduce(np.ones(10)),
    "large all_reduce": lambda c: c.all_reduce(np.ones(100_000)),
    "coded": lambda c: c.all_reduce_coded(np.ones(10_000, np.float32), "quant"),
    "reduce_scatter": lambda c: c.reduce_scatter(np.ones(30), np.ones(10)),
    "all_gather": lambda c: c.all_gather(np.ones(10), np.ones(30)),
    "all_to_all": lambda c: c.all_to_all(np.ones(30), np.ones(30)),
    "broadcast": lambda c: c.broadcast(np.ones(10), 2),
    "large broadcast": lambda c: c.broadcast(np.ones(100_000), 2),
    "barrier": lambda c: c.barrier(),
}


@each_value
@everywhere
@pytest.mark.parametrize("call", CALLS)
def test_in_an_operation(way, call):
    over = threading.Barrier(3)

    def job(c):
        c.barrier()
        c.timeout = 0.3
        start = time.monotonic()
        try:
            if c.rank < 2:
                CALLS[call](c)
        finally:
            took = time.monotonic() - start
            over.wait(10)
        return took

    *waited, absent = attempt(3, job, **WAYS[way])
    assert absent < 0.1
    for error in waited:
        assert isinstance(error, Timeout), error
        assert "rank 2" in str(error)
        assert "rank 0 and" not in str(error)
        assert "#2" in str(error)
        assert "300 ms" in str(error)


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
