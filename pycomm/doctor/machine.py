"""Check of the cores that ranks of this machine have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pycomm.doctor.finding import Finding, Topic

TOPIC = Topic("this machine")


def judge(cores: int, quota: float | None, ranks_here: int) -> Finding:
    """Return the finding on the cores of a machine.

    Args:
        cores: on which this process may run.
        quota: processor time that the container may use, in cores; None: no limit.
        ranks_here: number of ranks on the machine; 0: not known.
    """
    name = "cores"
    if quota is not None and quota < cores:
        return TOPIC.warning(
            name,
            f"{cores}, of whose time the container may use that of {quota:g}: ranks that wait by "
            "spinning use it up and are stopped in the middle of operations",
            f"bind the container to whole cores (docker run --cpuset-cpus), or start at most "
            f"{max(1, int(quota))} ranks and set OMP_NUM_THREADS",
        )
    if ranks_here > cores:
        return TOPIC.warning(
            name,
            f"{cores} for {ranks_here} ranks: they take turns, and every wait is for the scheduler",
            f"start at most {cores} ranks here, or give the job more cores (taskset, cgroups)",
        )
    plural = "s" * (ranks_here != 1)
    return TOPIC.ok(name, f"{cores} for {ranks_here} rank{plural}" if ranks_here else f"{cores}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
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
