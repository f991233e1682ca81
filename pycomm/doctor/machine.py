"""Checks of the system's limits: cores, shared memory, descriptors."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pycomm.doctor.finding import Finding, Topic

TOPIC = Topic("this machine")
MIB = 1 << 20
SHARED_BYTES = 64 * MIB
"""Memory mapped to test whether ranks can share it; a group of a few ranks takes as much."""
FILES_PER_RANK = 4
"""Descriptors that a group opens for each other rank: two sockets, and two for the rendezvous."""
OTHER_FILES = 256


@dataclass(frozen=True)
class Machine:
    """Facts on a machine; sizes are in bytes, None means no limit."""

    cores: int
    """Number of cores on which this process may run."""
    quota: float | None
    """Processor time that the container may use, in cores."""
    open_files: int | None
    memfd_error: str
    """Why memory cannot be shared; empty: it can."""


def look() -> Machine:
    """Return the facts on the machine of this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        quota=cpu_quota(),
        open_files=None if files == resource.RLIM_INFINITY else files,
        memfd_error=_memfd_error(),
    )


def judge(machine: Machine, ranks_here: int, ranks: int) -> Iterator[Finding]:
    """Yield findings for `ranks_here` of `ranks` ranks on this machine; 0: not known."""
    yield _cores(machine, ranks_here)
    yield _files(machine, ranks)
    if machine.memfd_error:
        yield TOPIC.warning(
            "shared memory",
            f"cannot be had ({machine.memfd_error}): ranks of this machine talk by TCP",
            "allow memfd_create and mmap in the container (its seccomp profile, its memory limit)",
        )
    else:
        yield TOPIC.ok("shared memory", "can be had (memfd); nothing is left after a crash")


def _cores(machine: Machine, ranks_here: int) -> Finding:
    cores, quota, name = machine.cores, machine.quota, "cores"
    if quota is not None and quota < cores:
        return TOPIC.warning(
            name,
            f"{cores}, of whose time the container may use that of {quota:g}: ranks that wait by "
            "spinning use it up and are stopped in the middle of operations",
            f"bind the container to whole cores (docker run --cpuset-cpus), or start at most "
            f"{max(1, int(quota))} ranks and set PYCOMM_SPIN=0 and OMP_NUM_THREADS",
        )
    if ranks_here > cores:
        return TOPIC.warning(
            name,
            f"{cores} for {ranks_here} ranks: they take turns, and every wait is for the scheduler",
            f"start at most {cores} ranks here, or give the job more cores (taskset, cgroups)",
        )
    plural = "s" * (ranks_here != 1)
    return TOPIC.ok(name, f"{cores} for {ranks_here} rank{plural}" if ranks_here else f"{cores}")


def _files(machine: Machine, ranks: int) -> Finding:
    name, limit = "open files", machine.open_files
    needed = OTHER_FILES + FILES_PER_RANK * ranks
    if limit is not None and limit < needed:
        return TOPIC.finding(
            "problem" if ranks else "warning",
            name,
            f"{limit} (ulimit -n); {ranks or 'a few'} ranks want about {needed}",
            f"ulimit -n {max(4096, 2 * needed)}, or LimitNOFILE= of the service",
        )
    return TOPIC.ok(name, f"{limit or 'no limit'} (ulimit -n)")


# ------------------------------------------------------------------------------- looking


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _memfd_error() -> str:
    try:
        fd = os.memfd_create("pycomm-doctor")
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(fd, SHARED_BYTES)
        with mmap.mmap(fd, SHARED_BYTES) as memory:
            memory[0] = memory[-1] = 1
    except OSError as error:
        return f"mapping a memfd: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the processor time that control groups allow, in cores; None: no limit.

    Reads both versions of control groups, from this process's own group up to the root, as far as
    it is mounted.

    Args:
        root: parent folder of /proc and /sys; for tests.
    """
    found: list[float] = []
    for line in _read(str(root / "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            found += _quota_of(folder)
    return min(found, default=None)


def _quota_of(folder: Path) -> Iterator[float]:
    quota, _, period = _read(str(folder / "cpu.max")).partition(" ")
    if not quota:
        quota = _read(str(folder / "cpu.cfs_quota_us"))
        period = _read(str(folder / "cpu.cfs_period_us"))
    if quota and quota not in ("max", "-1"):
        yield int(quota) / int(period)
