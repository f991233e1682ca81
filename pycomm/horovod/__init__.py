"""Horovod's interface for PyTorch, on pycomm: a script changes its import.

    import pycomm.horovod as hvd  # in place of: import horovod.torch as hvd

torchrun, srun or mpirun starts it. docs/migrating.md lists what differs. The interface is that of
`horovod.torch` (horovod.readthedocs.io); none of its code is used.
"""

from __future__ import annotations

from torch.nn import SyncBatchNorm

from pycomm.errors import Error as HorovodInternalError
from pycomm.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from pycomm.horovod.calls import (
    Handle,
)
from pycomm.horovod.compression import (
    Compression,
)
from pycomm.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from pycomm.horovod.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Op,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from pycomm.horovod.optimizer import (
    DistributedOptimizer,
)
from pycomm.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

# What Horovod has besides, and what to write instead.
_ELSEWHERE = {
    "join": "torch.distributed.algorithms.Join([model]), with DistributedDataParallel",
    "start_timeline": "PYCOMM_TRACE=folder, or pycomm.trace.dump(folder)",
    "stop_timeline": "PYCOMM_TRACE=folder, or pycomm.trace.dump(folder)",
}


def __getattr__(name: str) -> object:
    instead = f": write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"pycomm.horovod has no {name}{instead}")
