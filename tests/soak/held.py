"""Resources that a process holds: memory, files, threads, mappings, children.

Those that the soak finds between cases must not grow.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

COUNTS = ("files", "sockets", "threads", "mappings", "children")
"""What must not grow by one. `mappings` are those of memfds and of /dev/shm."""
MEMORY = ("rss_kib", "shared_kib", "heap_kib")
"""`rss_kib` leaves out pages of files: of code that runs for the first time, which is no leak."""


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return what a process's descriptors lead to, but for those that it closes meanwhile."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets: their numbers, and twins, which are closed again."""
    for number, target in descriptors().items():
        if target.startswith("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as twin:
                if twin.family in (socket.AF_INET, socket.AF_INET6):
                    yield number, twin


def held(pid: int | str) -> dict[str, int]:
    """Count what a process holds at this moment, as the kernel sees it.

    Raises:
        OSError: it is gone.
    """
    process = Path(f"/proc/{pid}")
    files = descriptors(pid).values()
    maps = (process / "maps").read_text().splitlines()
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    if "RssAnon" not in status:
        raise ProcessLookupError(f"process {pid} has ended, and waits to be buried")
    tasks = os.listdir(process / "task")
    children = 0
    for task in tasks:
        with contextlib.suppress(OSError):
            children += len((process / "task" / task / "children").read_text().split())
    return {
        "rss_kib": sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "files": sum(not target.endswith("/fd") for target in files),
        "sockets": sum(target.startswith("socket:") for target in files),
        "threads": len(tasks),
        "mappings": sum("/memfd:" in line or "/dev/shm/" in line for line in maps),
        "children": children,
    }


M_ARENA_MAX = -8  # malloc.h


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        ("_1", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # in use in mappings of their own
        ("_2", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # in use in the heap
        ("_3", ctypes.c_size_t * 2),
    ]


def use_one_arena() -> None:
    """Let all threads of this process allocate in one arena, before they have others.

    Of others `malloc_trim` gives back no free end, so that resident memory would have what each of
    them once had at most.
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def held_at_rest() -> dict[str, int]:
    """What this process holds when all that can be given back has been."""
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return {**held("self"), "heap_kib": (info.uordblks + info.hblkhd) // 1024}


# ------------------------------------------------------------------ the verdict


@dataclass
class Sample:
    """What the eldest process held when everything has been given back."""

    events: int
    """so far: cases, or kills"""
    held: dict[str, int]


SETTLED = 0.25
"""The share of the samples in which everything that is made once has been made."""
GROWTH = {"rss_kib": 512.0, "shared_kib": 512.0, "heap_kib": 512.0, "private_kib": 1024.0}
"""KiB per 100 events by which memory may grow. What the allocator has given out, and what is
resident of one arena, grow by 40 at most, and by 2500 where one group in each event is not given
back. Private memory, where each thread has an arena, may grow by more in runs of a few minutes."""
ENOUGH = 12
"""Samples from which on a slope says something."""


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Theil's: the median of the slopes between all pairs of points, which bears outliers."""
    steps = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in combinations(zip(x, y, strict=True), 2)
        if x2 > x1
    ]
    return statistics.median(steps) if steps else 0.0


def growths(samples: Sequence[Sample]) -> dict[str, float]:
    """KiB per 100 events by which the process's memory grows, when it has settled."""
    late = samples[int(SETTLED * len(samples)) :]
    events = [float(sample.events) for sample in late]
    return {
        name: 100 * slope(events, [float(sample.held[name]) for sample in late])
        for name in samples[0].held
        if name in GROWTH
    }


def breaches(samples: Sequence[Sample]) -> list[str]:
    """Everything that is not flat in the samples, oldest first."""
    wrong: list[str] = []
    if not samples:
        return wrong
    early = samples[: max(1, int(SETTLED * len(samples)))]
    for name in COUNTS:
        most = max(sample.held[name] for sample in early)
        last = samples[-1].held[name]
        # What is left behind stays, so the last sample shows it.
        if last > most:
            wrong.append(f"{last} {name}, at most {most} at first")
    if len(samples) >= ENOUGH:
        for name, growth in growths(samples).items():
            if growth > GROWTH[name]:
                allowed = f"allowed are {GROWTH[name]:.0f}"
                wrong.append(f"{name} grows by {growth:.0f} in 100 events, {allowed}")
    return wrong
