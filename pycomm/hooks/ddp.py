"""The communication hook for DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks.state import CompressionState
from pycomm.policy import Policy


class HookState(CompressionState):
    """What `compress_hook` keeps between steps: see `CompressionState`.

    Args:
        codec: a codec, a `Policy`, or the text of either; see `CompressionState`.
        model: the DDP model. Without it parameters are numbered in the order in which they first
            appear, and rules by name have nothing to look at.
        process_group: where to reduce; None: the model's group, or the default group.
        options: feedback and seed, as `CompressionState` has them.

    Example:
        >>> import pycomm
        >>> state = pycomm.HookState("int4", model)  # doctest: +SKIP
        >>> model.register_comm_hook(state, pycomm.compress_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        codec: str | Codec | Policy = "int8",
        model: DistributedDataParallel | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if process_group is None and model is not None:
            process_group = model.process_group
        super().__init__(codec, process_group=process_group, **options)
        # Weak: the model's reducer holds this state, in C++, where no garbage collector looks.
        self._model = weakref.ref(model) if model is not None else None
        if model is not None:
            for name, parameter in model.module.named_parameters():
                self.add(name, parameter)
        self._nobody_used: set[str] = set()  # in the last step
        # In the order of DDP's reducer.
        self._reduced = [self._names[id(p)] for p in self._parameters if p.requires_grad]

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP's over the group; see `compress_hook`."""
        if bucket.index() == 0:
            self.begin_step()
        for parameter in bucket.parameters():
            if id(parameter) not in self._names:
                self.add(self._new_name(parameter), parameter)
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        future = self.reduce(bucket.buffer(), names)
        if bucket.is_last():
            self.end_step()
            model = self._model() if self._model else None
            if model is not None and model.find_unused_parameters and not model.static_graph:
                # Behind the callback with which DDP ends the backward; it comes behind this one.
                queue = torch.autograd.Variable._execution_engine.queue_callback
                queue(lambda: queue(self._look_for_unused))
        return future

    def _unused(self) -> set[str]:
        return self._nobody_used

    def _look_for_unused(self) -> None:
        """Note the parameters that no rank has used: DDP leaves their gradients as they are."""
        model = self._model() if self._model else None
        assert model is not None  # its backward has just ended
        used = model.reducer._get_local_used_map()  # of all ranks together
        if used.numel() == len(self._reduced):  # else the model froze some after it was wrapped
            self._nobody_used = {
                name for name, n in zip(self._reduced, used.tolist(), strict=True) if not n
            }

    def _new_name(self, parameter: torch.Tensor) -> str:
        if self._model is not None:
            raise Error(
                f"rank {self.process_group.rank()}: a gradient of shape "
                f"{tuple(parameter.shape)} belongs to no parameter of this state's model"
            )
        return f"parameter{len(self._names)}"


def compress_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all ranks, compressed.

    Decoded values are summed in float32 in rank order and divided once, by the rank that owns them,
    so all ranks get the same bits. With the codec "fp32" these are the exact average; DDP itself
    divides before it sums, which for two ranks gives the same bits.

    Args:
        state: codec and feedback; the same on all ranks.
        bucket: float32, or 16-bit floats, which are added up in float32 and rounded once. Other
            dtypes are averaged as they are.

    Returns:
        A future of the bucket's tensor.

    Raises:
        Error: the gradients are sparse; and what the group's all_reduce raises.
    """
    return state.reduce_bucket(bucket)
