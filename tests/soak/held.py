"""Resources that a process holds: memory, files, threads, mappings, children."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

COUNTS = ("files", "sockets", "threads", "mappings", "children")
"""What must not grow by one. `mappings` are those of memfds and of /dev/shm."""
MEMORY = ("rss_kib", "shared_kib", "heap_kib")


def held(pid: int | str) -> dict[str, int]:
    """Count what a process holds at this moment, as the kernel sees it.

    Raises:
        OSError: it is gone.
    """
    process = Path(f"/proc/{pid}")
    files = []
    for name in os.listdir(process / "fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(process / "fd" / name))
    maps = (process / "maps").read_text().splitlines()
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended, and waits to be buried")
    tasks = os.listdir(process / "task")
    children = 0
    for task in tasks:
        with contextlib.suppress(OSError):
            children += len((process / "task" / task / "children").read_text().split())
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "files": sum(not target.endswith("/fd") for target in files),
        "sockets": sum(target.startswith("socket:") for target in files),
        "threads": len(tasks),
        "mappings": sum("/memfd:" in line or "/dev/shm/" in line for line in maps),
        "children": children,
    }


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        ("_1", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # in use in mappings of their own
        ("_2", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # in use in the heap
        ("_3", ctypes.c_size_t * 2),
    ]


def held_at_rest() -> dict[str, int]:
    """What this process holds when all that can be given back has been."""
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return {**held("self"), "heap_kib": (info.uordblks + info.hblkhd) // 1024}
