"""The ranks of a probe, and how long all-reduces of some of them take."""

from __future__ import annotations

import array
import statistics
import time
from pathlib import Path

from pycomm import _C
from pycomm.communicator import Communicator, Store

PAUSE = 0.03  # seconds after which a token bucket is full again


class Ranks:
    """The ranks of a probe, and what they tell each other."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.store, self.rank, self.size = Store.file(str(folder)), rank, size
        self.group = Communicator(self.store, rank, size, group="probe", timeout=60)

    def gather(self, name: str, mine: str) -> list[str]:
        """What each rank says, in rank order."""
        self.store.set(f"probe/{name}/{self.rank}", mine)
        keys = (f"probe/{name}/{rank}" for rank in range(self.size))
        return [self.store.get(key, 60.0).decode() for key in keys]

    def rest(self, name: str) -> None:
        """Sleep until all are here: who waits in a collective looks about, and others feel it."""
        self.gather(name, "")

    def nodes(self) -> list[int]:
        """The node of each rank."""
        levels = self.group.core.levels
        if levels:
            return levels
        before = self.group.wire_bytes()
        self.group.all_reduce(bytearray(1024))
        return list(range(self.size)) if self.group.wire_bytes() > before else [0] * self.size


def all_reduces(
    group: Communicator, size: int, times: int, *, pause: float = 0.0
) -> tuple[float, float]:
    """Seconds of one all-reduce, and of a core in it: medians, and the same on all ranks."""
    data = group.allocate(size // 4)
    wall, core = [], []
    group.all_reduce(data)
    for _ in range(times):
        if pause:
            time.sleep(pause)
            group.barrier()
        begin, begin_core = time.perf_counter(), time.process_time()
        group.all_reduce(data)
        wall.append(time.perf_counter() - begin)
        core.append(time.process_time() - begin_core)
    found = array.array("d", [statistics.median(wall), statistics.fmean(core)])
    address = _C.buffer(found, True)[0]
    group.core.all_reduce(address, len(found), _C.DType.float64, _C.ReduceOp.max)
    return found[0], found[1]
