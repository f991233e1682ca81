"""The ranks of a job as Horovod counts them: all, those of a host, those of one place on hosts."""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pycomm.env import env
from pycomm.errors import Error
from pycomm.horovod import process_sets as process_sets_
from pycomm.launch import launch_env
from pycomm.policy.exchange import gather_json


@dataclass(frozen=True)
class Places:
    """Where this rank stands among the others."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_places: tuple[weakref.ref[dist.ProcessGroup], Places] | None = None
_made_here = False


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Make the group of all ranks, on pycomm unless `torch.distributed` has one; collective.

    torchrun, srun and mpirun tell the ranks who they are; without them there is one rank.

    Args:
        comm: None; the ranks are those that the launcher has started.
        process_sets: sets of ranks whose groups are made; the same on all ranks. Others can always
            be added later, for which Horovod wants "dynamic" here.

    Raises:
        Error: a comm is given, or the launcher has not told enough (`pycomm.launch_env`).
        ValueError: two process sets have the same ranks, or one has ranks that are not there.
    """
    global _places, _made_here
    if comm is not None:
        raise Error(
            "pycomm.horovod.init takes no comm: the ranks are those that the launcher has "
            "started, and hvd.add_process_set(ranks) makes smaller groups"
        )
    if is_initialized():
        return
    if not dist.is_initialized():
        launch_env()
        if env().rank is None and env().world_size is None:
            alone = _distributed_c10d.HashStore()
            dist.init_process_group("pycomm", store=alone, rank=0, world_size=1)
        else:
            dist.init_process_group("pycomm")
        _made_here = True
    group = dist.group.WORLD
    assert group is not None
    process_sets_.begin([] if process_sets == "dynamic" else list(process_sets or ()))
    _places = (weakref.ref(group), _compare())


def _compare() -> Places:
    """Compare the ranks' hosts; collective."""
    settings = env()
    told = (socket.gethostname(), settings.local_rank, settings.local_world_size)
    assert dist.group.WORLD is not None
    everyone = gather_json(told, dist.group.WORLD)
    rank = dist.get_rank()
    locals_: list[int] = []
    for other, (host, given, _) in enumerate(everyone):
        before = [h for h, *_ in everyone[:other]].count(host)
        locals_.append(before if given is None else given)
    sizes = [
        [h for h, *_ in everyone].count(host) if given is None else given
        for host, _, given in everyone
    ]
    peers = [other for other, local in enumerate(locals_) if local == locals_[rank]]
    return Places(locals_[rank], sizes[rank], peers.index(rank), len(peers), len(set(sizes)) == 1)


def shutdown() -> None:
    """Leave the group, if `init` has made it."""
    global _places, _made_here
    if _made_here and dist.is_initialized():
        dist.destroy_process_group()
    process_sets_.end()
    _places, _made_here = None, False


def is_initialized() -> bool:
    """Return whether `init` was called for the group that `torch.distributed` has now."""
    return _places is not None and dist.is_initialized() and _places[0]() is dist.group.WORLD


def places() -> Places:
    """Return where this rank stands.

    Raises:
        Error: `init` was not called.
    """
    if _places is None or not is_initialized():
        raise Error("pycomm.horovod has no group yet: call hvd.init() first")
    return _places[1]


def rank() -> int:
    """Return this rank's number among all ranks."""
    places()
    return dist.get_rank()


def size() -> int:
    """Return the number of all ranks."""
    places()
    return dist.get_world_size()


def local_rank() -> int:
    """Return this rank's number among those of its host, for torch.cuda.set_device."""
    return places().local_rank


def local_size() -> int:
    """Return the number of ranks of this host."""
    return places().local_size


def cross_rank() -> int:
    """Return this rank's number among those with the same local rank, one on each host."""
    return places().cross_rank


def cross_size() -> int:
    """Return the number of ranks with this local rank."""
    return places().cross_size


def is_homogeneous() -> bool:
    """Return whether each host has the same number of ranks."""
    return places().homogeneous


def nccl_built() -> int:
    """Return the version of NCCL that this torch can use, as 22304 is 2.23.4; 0: none.

    Scripts ask it before they use GPUs of one host alike.
    """
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def gloo_built() -> bool:
    """Return True: ranks can meet, and do, without MPI."""
    return True


def mpi_built() -> bool:
    """Return False: nothing needs MPI, oneCCL or DDL; mpirun may start the ranks."""
    return False


gloo_enabled = gloo_built
mpi_enabled = mpi_threads_supported = ccl_built = ddl_built = mpi_built


def cuda_built() -> bool:
    """Return whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch was built for ROCm."""
    return torch.version.hip is not None
