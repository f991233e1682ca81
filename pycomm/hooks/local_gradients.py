"""DDP's hook for optimizers that exchange something else than gradients: it averages nothing."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from pycomm.errors import Error
from pycomm.reduction.reducer import completed


class LocalGradients:
    """State of `keep_local`: each rank keeps the gradients of its own data.

    With a loss scaler ranks have to agree on whether a step overflows, since each of them skips it
    and lowers its scale by what it finds in its own gradients. So a rank's overflow is told to all,
    which put Inf into a gradient each.

    Args:
        model: a DDP model without a communication hook.
        scaled: a `torch.amp.GradScaler` scales the gradients.
    """

    def __init__(self, model: DistributedDataParallel, *, scaled: bool) -> None:
        self._group: dist.ProcessGroup = model.process_group
        self._scaled = scaled
        self._overflows = False

    def keep(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a bucket as it is, or with Inf if a rank's gradients are not finite."""
        if torch._C._current_graph_task_id() == -1:
            raise Error(
                f"rank {self._group.rank()}: Join shadows this rank, which has no more data and "
                "takes no more steps, so that it cannot take part in those of the others: give all "
                "ranks equally many batches"
            )
        values = bucket.buffer()
        if self._scaled:
            self._overflows &= bucket.index() > 0  # else it is of a backward that has failed
            self._overflows |= not bool(values.isfinite().all())
            if bucket.is_last():
                flag = torch.tensor(
                    [float(self._overflows)], device=values.device, dtype=torch.float32
                )
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
                self._overflows = False
                if float(flag):
                    values.fill_(torch.inf)
        return completed(values)


def keep_local(state: LocalGradients, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave each rank the gradients of its own data; a communication hook of DDP."""
    return state.keep(bucket)
