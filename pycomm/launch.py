"""Ranks that `srun` or `mpirun` has started: their variables, given the names that torchrun uses.

torch's `init_process_group` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and scripts read
LOCAL_RANK; only torchrun sets them. Slurm and MPI tell the same under their own names:

* Slurm's steps: "OUTPUT ENVIRONMENT VARIABLES" in the manual page of srun.
* Open MPI: OMPI_COMM_WORLD_*, in its FAQ on running jobs.
* Hydra, the `mpirun` of MPICH, MVAPICH and Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID,
  MPI_LOCALNRANKS.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from pycomm import env
from pycomm.errors import Error

__all__ = ["Place", "find", "launch_env", "rank_and_size", "variables"]

# Below the ports that Linux gives to outgoing connections, which begin at 32768.
FIRST_PORT, PORTS = 15000, 10000


@dataclass(frozen=True)
class Place:
    """What a launcher has told a rank."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    host: str = ""
    """of rank 0, as the launcher names it; empty: not told"""
    job: str = ""
    """differs between jobs that run at the same time; empty: not told"""


def find(given: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher other than torchrun has given to this rank.

    MPI goes first: under Slurm, `mpirun` starts one daemon on each node by srun, and its ranks
    inherit the daemon's variables.

    Args:
        given: the variables of the environment.

    Returns:
        None if no such launcher has started this process; also in the batch script of a Slurm job,
        which has variables of the job, and is no rank.

    Raises:
        Error: a variable is no number, or the job is one that cannot be understood.
    """
    for make in (_mpi, _slurm, _pmi):
        if (found := make(given)) is not None:
            return found
    return None


def _mpi(given: Mapping[str, str]) -> Place | None:
    # Launcher, rank, size, local rank, local size, and what names the job.
    known = (
        ("Open MPI", "OMPI_COMM_WORLD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE", "PMIX_NAMESPACE"),
        ("Hydra", "", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", ""),
    )
    for launcher, prefix, words, job in known:
        names = [prefix + word for word in words.split()]
        if all(name in given for name in names):
            rank, size, local_rank, local_size = (_number(given, name) for name in names)
            host = "127.0.0.1" if local_size == size else _first_host(_nodes(given))
            return Place(
                launcher, rank, size, local_rank, local_size, host=host, job=given.get(job, "")
            )
    return None


def _slurm(given: Mapping[str, str]) -> Place | None:
    if "SLURM_PROCID" not in given or "SLURM_STEP_NUM_TASKS" not in given:
        return None
    if "SLURM_HET_SIZE" in given:
        raise Error(
            "this is a heterogeneous Slurm job, whose parts count their tasks by themselves: set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT yourself, or use torchrun"
        )
    node = _number(given, "SLURM_NODEID")
    tasks = _tasks_per_node(given.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Place(
        "Slurm",
        _number(given, "SLURM_PROCID"),
        _number(given, "SLURM_STEP_NUM_TASKS"),
        _number(given, "SLURM_LOCALID"),
        tasks[node] if node < len(tasks) else None,
        node,
        _first_host(_nodes(given)),
        f"{given.get('SLURM_JOB_ID', '')}.{given.get('SLURM_STEP_ID', '')}",
    )


def _pmi(given: Mapping[str, str]) -> Place | None:
    if "PMI_RANK" not in given or "PMI_SIZE" not in given:
        return None
    return Place("PMI", _number(given, "PMI_RANK"), _number(given, "PMI_SIZE"))


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables that are missing in an environment, from another launcher's.

    Args:
        given: the variables of the environment. Those of torchrun that are there stay.

    Returns:
        Those to be set; empty if RANK and WORLD_SIZE are set, or if no known launcher has started
        this process.

    Raises:
        Error: the launcher does not tell where rank 0 runs, or contradicts a variable that is set.
    """
    if "RANK" in given and "WORLD_SIZE" in given:
        return {}
    place = find(given)
    if place is None:
        return {}
    for name, value in (("RANK", place.rank), ("WORLD_SIZE", place.size)):
        if name in given and _number(given, name) != value:
            raise Error(
                f"{name}={given[name]} is set, and {place.launcher} says {value}: set both RANK "
                "and WORLD_SIZE, or neither"
            )
    told = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node,
        "MASTER_ADDR": given.get("MASTER_ADDR", place.host),
        "MASTER_PORT": _port(place, given.get("PYCOMM_PORTS", "")),
    }
    if not told["MASTER_ADDR"]:
        raise Error(
            f"{place.launcher} does not tell on which host rank 0 runs: add MASTER_ADDR and "
            "MASTER_PORT, with Open MPI mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500, with "
            "Hydra mpirun -genv MASTER_ADDR host -genv MASTER_PORT 29500"
        )
    return {
        name: str(value) for name, value in told.items() if value is not None and name not in given
    }


def launch_env() -> dict[str, str]:
    """Set torchrun's variables from those of `srun` or `mpirun`, where torchrun's are missing.

    Call it before `init_process_group`, in scripts that `srun` or `mpirun` starts with one task for
    each rank. Under torchrun, and in a process that no launcher has started, it changes nothing.
    `python -m pycomm.run` calls it for the script. MASTER_ADDR becomes the first host of the step,
    and MASTER_PORT follows from the number of the job, so that jobs which share a host differ: a
    port of PYCOMM_PORTS if that is set, else one from 15000 to 24999.

    Returns:
        The variables that it has set of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK
        (the node's number, by Slurm only), MASTER_ADDR and MASTER_PORT, without those that were
        set before.

    Raises:
        Error: the launcher does not tell where rank 0 runs (Open MPI and Hydra on several hosts
            outside Slurm), or contradicts RANK or WORLD_SIZE; the text says what to set.

    Example:
        >>> import pycomm, torch.distributed as dist
        >>> pycomm.launch_env()  # doctest: +SKIP
        {'RANK': '2', 'WORLD_SIZE': '4', 'LOCAL_RANK': '0', ..., 'MASTER_PORT': '17310'}
        >>> dist.init_process_group("pycomm")  # doctest: +SKIP
    """
    missing = variables(env.everything())
    env.set_missing(missing)
    return missing


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks, as any launcher has told them.

    Raises:
        Error: no launcher has, or one of its variables is no number.
    """
    settings = env.env()
    if settings.rank is not None and settings.world_size is not None:
        return settings.rank, settings.world_size
    place = find(env.everything())
    if place is None:
        raise Error("RANK and WORLD_SIZE are not set; start with torchrun, srun or mpirun")
    return place.rank, place.size


def _nodes(given: Mapping[str, str]) -> str:
    names: tuple[str, ...] = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # An mpirun in a job has a step of its own, which leaves out the node that it runs on.
    names = names[1:] if "OMPI_COMM_WORLD_RANK" in given or "PMI_RANK" in given else names
    return next((given[name] for name in names if given.get(name)), "")


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu-02" of "gpu-[02-07,9],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers of Slurm's text: [2, 2, 2, 1] of "2(x3),1"."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def _port(place: Place, ports: str) -> int:
    first, size = FIRST_PORT, PORTS
    if limits := re.fullmatch(r"(\d+)(?:-(\d+))?", ports):
        first = int(limits[1])
        size = max(1, int(limits[2] or first) - first + 1)
    elif not place.job:
        return 29500  # torchrun's
    return first + zlib.crc32(place.job.encode()) % size


def _number(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise Error(f"{name}={text!r} is not an integer") from None
