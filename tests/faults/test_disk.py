"""Full disks and exhausted shared memory: no data are lost."""

from __future__ import annotations

import resource
import signal

import numpy as np
import pytest

from pycomm.communicator import Store
from pycomm.errors import Error
from tests.ranks import run_processes


def without_room(rank: int = 0, room: int = 4096) -> None:
    """Limit the files that this process writes to `room` bytes, shared memory included."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def test_without_room_for_shared_memory_ranks_talk_by_tcp():
    def job(c):
        x = np.full(1000, c.rank + 1.0)
        c.all_reduce(x)
        return c.describe(), float(x[0])

    for how, total in run_processes(2, job, prepare=without_room, transport="auto"):
        assert "tcp to" in how
        assert total == 3


def test_without_room_for_shared_memory_alone():
    with pytest.raises(AssertionError, match=r'does not reach rank .; use transport "auto"'):
        run_processes(2, lambda c: c.barrier(), prepare=without_room, transport="shm")


def test_a_store_on_a_full_disk_says_so_and_leaves_nothing(tmp_path):
    store = Store.file(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.getsignal(signal.SIGXFSZ)
    try:
        without_room(room=2)
        with pytest.raises(Error, match=r"cannot write .*File too large"):
            store.set("key", "a long value")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.rglob("*.*")) == []
    store.set("key", "a long value")
    assert store.get("key", timeout=1) == b"a long value"
