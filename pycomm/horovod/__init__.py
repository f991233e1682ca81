"""Horovod's interface for PyTorch, on pycomm: a script changes its import.

    import pycomm.horovod as hvd  # in place of: import horovod.torch as hvd

torchrun, srun or mpirun starts it. docs/migrating.md lists what differs. The interface is that of
`horovod.torch` (horovod.readthedocs.io); none of its code is used.
"""

from __future__ import annotations

from types import ModuleType

from torch.nn import SyncBatchNorm as SyncBatchNorm

from pycomm import errors
from pycomm.horovod.basics import ccl_built as ccl_built
from pycomm.horovod.basics import cross_rank as cross_rank
from pycomm.horovod.basics import cross_size as cross_size
from pycomm.horovod.basics import cuda_built as cuda_built
from pycomm.horovod.basics import ddl_built as ddl_built
from pycomm.horovod.basics import gloo_built as gloo_built
from pycomm.horovod.basics import gloo_enabled as gloo_enabled
from pycomm.horovod.basics import init as init
from pycomm.horovod.basics import is_homogeneous as is_homogeneous
from pycomm.horovod.basics import is_initialized as is_initialized
from pycomm.horovod.basics import local_rank as local_rank
from pycomm.horovod.basics import local_size as local_size
from pycomm.horovod.basics import mpi_built as mpi_built
from pycomm.horovod.basics import mpi_enabled as mpi_enabled
from pycomm.horovod.basics import mpi_threads_supported as mpi_threads_supported
from pycomm.horovod.basics import nccl_built as nccl_built
from pycomm.horovod.basics import rank as rank
from pycomm.horovod.basics import rocm_built as rocm_built
from pycomm.horovod.basics import shutdown as shutdown
from pycomm.horovod.basics import size as size
from pycomm.horovod.calls import Handle as Handle
from pycomm.horovod.functions import allgather_object as allgather_object
from pycomm.horovod.functions import broadcast_object as broadcast_object
from pycomm.horovod.functions import broadcast_optimizer_state as broadcast_optimizer_state
from pycomm.horovod.functions import broadcast_parameters as broadcast_parameters
from pycomm.horovod.operations import Adasum as Adasum
from pycomm.horovod.operations import Average as Average
from pycomm.horovod.operations import Compression as Compression
from pycomm.horovod.operations import Max as Max
from pycomm.horovod.operations import Min as Min
from pycomm.horovod.operations import Op as Op
from pycomm.horovod.operations import Product as Product
from pycomm.horovod.operations import Sum as Sum
from pycomm.horovod.operations import allgather as allgather
from pycomm.horovod.operations import allgather_async as allgather_async
from pycomm.horovod.operations import allreduce as allreduce
from pycomm.horovod.operations import allreduce_ as allreduce_
from pycomm.horovod.operations import allreduce_async as allreduce_async
from pycomm.horovod.operations import allreduce_async_ as allreduce_async_
from pycomm.horovod.operations import alltoall as alltoall
from pycomm.horovod.operations import alltoall_async as alltoall_async
from pycomm.horovod.operations import barrier as barrier
from pycomm.horovod.operations import broadcast as broadcast
from pycomm.horovod.operations import broadcast_ as broadcast_
from pycomm.horovod.operations import broadcast_async as broadcast_async
from pycomm.horovod.operations import broadcast_async_ as broadcast_async_
from pycomm.horovod.operations import grouped_allgather as grouped_allgather
from pycomm.horovod.operations import grouped_allgather_async as grouped_allgather_async
from pycomm.horovod.operations import grouped_allreduce as grouped_allreduce
from pycomm.horovod.operations import grouped_allreduce_ as grouped_allreduce_
from pycomm.horovod.operations import grouped_allreduce_async as grouped_allreduce_async
from pycomm.horovod.operations import grouped_allreduce_async_ as grouped_allreduce_async_
from pycomm.horovod.operations import grouped_reducescatter as grouped_reducescatter
from pycomm.horovod.operations import grouped_reducescatter_async as grouped_reducescatter_async
from pycomm.horovod.operations import poll as poll
from pycomm.horovod.operations import reducescatter as reducescatter
from pycomm.horovod.operations import reducescatter_async as reducescatter_async
from pycomm.horovod.operations import sparse_allreduce_async as sparse_allreduce_async
from pycomm.horovod.operations import synchronize as synchronize
from pycomm.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from pycomm.horovod.process_sets import ProcessSet as ProcessSet
from pycomm.horovod.process_sets import add_process_set as add_process_set
from pycomm.horovod.process_sets import global_process_set as global_process_set
from pycomm.horovod.process_sets import remove_process_set as remove_process_set

HorovodInternalError = errors.Error

# For `from pycomm.horovod import *`: the names above, without the modules that they are from.
__all__ = [
    name
    for name, value in list(globals().items())
    if not (
        name.startswith("_") or isinstance(value, ModuleType) or value in (ModuleType, annotations)
    )
]

# What Horovod has besides, and what to write instead.
_ELSEWHERE = {
    "elastic": "checkpoints under torchrun --nnodes MIN:MAX --max-restarts N (examples/resume.py)",
    "join": "torch.distributed.algorithms.Join([model]), with DistributedDataParallel",
    "start_timeline": "PYCOMM_TRACE=folder, or pycomm.trace.dump(folder)",
    "stop_timeline": "PYCOMM_TRACE=folder, or pycomm.trace.dump(folder)",
}


def __getattr__(name: str) -> object:
    instead = f": write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"pycomm.horovod has no {name}{instead}")
