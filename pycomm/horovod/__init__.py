"""Horovod's interface for PyTorch, on pycomm: a script changes its import.

    import pycomm.horovod as hvd  # in place of: import horovod.torch as hvd

torchrun, srun or mpirun starts it. docs/migrating.md lists what differs. The interface is that of
`horovod.torch` (horovod.readthedocs.io); none of its code is used.
"""

from __future__ import annotations

from pycomm.horovod.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    nccl_built,
    rank,
    shutdown,
    size,
)
from pycomm.horovod.compression import Compression
from pycomm.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from pycomm.horovod.operations import (
    Average,
    Handle,
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
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from pycomm.horovod.optimizer import DistributedOptimizer

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Op",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "nccl_built",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

# What Horovod has besides, and what to write instead.
_ELSEWHERE = {
    "Adasum": "op=hvd.Average, or pycomm.LocalSGD(model, every=...) for rare averages",
    "ProcessSet": "dist.new_group(ranks)",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "add_process_set": "dist.new_group(ranks)",
    "alltoall": "dist.all_to_all_single(output, tensor, output_splits, input_splits)",
    "elastic": "torchrun --nnodes MIN:MAX, and a checkpoint; docs/clusters.md",
    "join": "torch.distributed.algorithms.Join([model]), with DistributedDataParallel",
    "reducescatter": "dist.reduce_scatter_tensor(output, tensor)",
    "sparse_allreduce_async": "dist.all_reduce(tensor), which takes sparse tensors",
}


def __getattr__(name: str) -> object:
    instead = f": write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"pycomm.horovod has no {name}{instead}")
