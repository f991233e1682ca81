"""Ranks of a probe: their groups, their exchange of values, and timed all-reduces."""

from __future__ import annotations

import array
import statistics
import time
from collections.abc import Callable, Sequence

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.plan.codecs import Coding
from pycomm.stores import at_master

PAUSE = 0.03  # seconds after which a token bucket is full again


class Ranks:
    """The ranks of a probe, and the values that they exchange."""

    def __init__(self, rank: int, size: int) -> None:
        self.store, self.rank, self.size = at_master(rank, _C.CommunicatorOptions()), rank, size
        self.group = Communicator(self.store, rank, size, group="probe", timeout=60)
        self._groups: dict[str, Communicator] = {}
        self._told = 0

    def members(self, name: str, rank: int, size: int, algo: str) -> Communicator:
        """Return a group of some of the ranks, made at the first call."""
        if name not in self._groups:
            made = Communicator(self.store, rank, size, group=f"probe-{name}", algo=algo)
            self._groups[name] = made
        return self._groups[name]

    def gather(self, mine: str = "") -> list[str]:
        """Return each rank's value, in rank order. All ranks call this, in the same order."""
        self._told += 1
        self.store.set(f"probe/{self._told}/{self.rank}", mine)
        keys = (f"probe/{self._told}/{rank}" for rank in range(self.size))
        return [self.store.get(key, 60.0).decode() for key in keys]

    def rest(self) -> None:
        """Sleep until all ranks are here: waiting in a collective would poll and slow others."""
        self.gather()

    def nodes(self) -> list[int]:
        """Return the node of each rank."""
        levels = self.group.core.levels
        if levels:
            return levels
        before = self.group.wire_bytes()
        self.group.all_reduce(bytearray(1024))
        return list(range(self.size)) if self.group.wire_bytes() > before else [0] * self.size


def all_reduces(
    group: Communicator,
    size: int,
    times: int,
    *,
    pause: float = 0.0,
    typical: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[float, float]:
    """Return the typical seconds of one on the slowest rank, and the mean core seconds."""
    data = group.allocate(size // 4)
    group.all_reduce(data)
    return _clocked(group, times, pause, lambda: group.all_reduce(data), typical=typical)


def coded_all_reduces(
    group: Communicator, source: array.array[float], numel: int, coding: Coding, times: int
) -> tuple[float, float]:
    """Time all-reduces with a codec, each after a pause in which others use the caches."""
    data = array.array("f", bytes(4 * numel))

    def fill() -> None:
        data[:] = source[:numel]

    return _clocked(
        group, times, PAUSE, lambda: group.all_reduce_coded(data, coding.spec), before=fill
    )


def _clocked(
    group: Communicator,
    times: int,
    pause: float,
    call: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    typical: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[float, float]:
    wall, core = [], []
    for _ in range(times):
        before()
        if pause:
            time.sleep(pause)
            group.barrier()
        begin, begin_core = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - begin)
        core.append(time.process_time() - begin_core)
    slowest = _over(group, wall, "max")
    return typical(slowest), statistics.median(_over(group, core, "avg"))


def _over(group: Communicator, values: Sequence[float], op: str) -> Sequence[float]:
    """Reduce each of the values over all ranks, which makes them equal on all."""
    found = array.array("d", values)
    group.all_reduce(found, op)
    return found
