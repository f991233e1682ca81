"""Horovod's collectives on tensors of any device, each as a function and as a handle.

All ranks call the same operations in the same order, as with `torch.distributed`. Horovod sorts
them by name; here names are not needed, and a different order is an error that names both calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arguments import typed
from pycomm.errors import Error
from pycomm.horovod.basics import places, size
from pycomm.horovod.compression import Coded, Compression


class Op(Enum):
    """What an all-reduce calculates."""

    Average = dist.ReduceOp.AVG
    Sum = dist.ReduceOp.SUM
    Min = dist.ReduceOp.MIN
    Max = dist.ReduceOp.MAX
    Product = dist.ReduceOp.PRODUCT


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product


class Handle:
    """An operation that runs; `synchronize` returns its result, `poll` says whether it has one."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works = list(works)
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the end, and return the tensor, or the list of tensors.

        Raises:
            Error: the operation failed; the text says which rank and why.
        """
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result."""
    typed("handle", handle, Handle)
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return at once."""
    typed("handle", handle, Handle)
    return handle.done()


def _op(op: Op | None, average: bool | None) -> Op:
    if op is not None and average is not None:
        raise ValueError("op= and average= say the same: give op=, since average= is deprecated")
    if op is None:
        return Op.Sum if average is False else Op.Average
    typed("op", op, Op)
    return op


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:  # towards zero, as Horovod scales integers
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an all-reduce of several tensors in place.

    Args:
        tensors: of the same shapes and dtypes on all ranks.
        average: deprecated; True: op=Average, False: op=Sum.
        name: not used.
        op: None means Average.
        prescale_factor: factor of each rank's values before they are reduced.
        postscale_factor: factor of the result.

    Raises:
        ValueError: both op and average are given.
        Error: `init` was not called.
    """
    chosen = _op(op, average)
    ranks = size()
    after = postscale_factor / ranks if chosen is Op.Average else postscale_factor
    reduction = dist.ReduceOp.SUM if chosen is Op.Average else chosen.value
    flat = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    for tensor in flat:
        _scale(tensor, prescale_factor)
    works = [dist.all_reduce(tensor, reduction, async_op=True) for tensor in flat]

    def finish() -> list[torch.Tensor]:
        for tensor, values in zip(tensors, flat, strict=True):
            _scale(values, after)
            if values is not tensor:
                tensor.copy_(values)
        return list(tensors)

    return Handle(works, finish)


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce of several tensors, whose results are new tensors."""
    return grouped_allreduce_async_([t.detach().clone() for t in tensors], *args, **kwargs)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """All-reduce several tensors in place."""
    return list(grouped_allreduce_async_(tensors, *args, **kwargs).wait())


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """All-reduce several tensors and return the results; gradients flow through, as `allreduce`."""
    options = (average, name, compression, op, prescale_factor, postscale_factor)
    return [allreduce(tensor, *options) for tensor in tensors]


def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce in place; the arguments are those of `grouped_allreduce_async_`."""
    return _single(grouped_allreduce_async_([tensor], *args, **kwargs))


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce whose result is a new tensor."""
    return _single(grouped_allreduce_async([tensor], *args, **kwargs))


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """All-reduce in place."""
    result: torch.Tensor = allreduce_async_(tensor, *args, **kwargs).wait()
    return result


def _single(handle: Handle) -> Handle:
    return Handle([handle], lambda: handle.wait()[0])


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the average over all ranks, or another reduction; the tensor stays as it is.

    If the tensor requires gradients, so does the result; the gradient is reduced the same way,
    which is right for Average and Sum.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: deprecated; True: op=Average, False: op=Sum.
        name: not used.
        compression: Compression.none, fp16, or an object with Horovod's `compress` and
            `decompress`.
        op: None means Average.
        prescale_factor: factor of each rank's values before they are reduced.
        postscale_factor: factor of the result.

    Raises:
        ValueError: both op and average are given.
        Error: `init` was not called, the compression is a codec, or gradients would have to flow
            through Min, Max or Product.
    """
    if isinstance(compression, Coded):
        raise Error(
            "Compression.codec is for DistributedOptimizer, which keeps what a codec loses: use "
            "Compression.none or fp16 for a single allreduce"
        )
    chosen = _op(op, average)
    if tensor.requires_grad and chosen not in (Op.Average, Op.Sum):
        raise Error(f"no gradients flow through {chosen.name}: detach the tensor first")
    compressed, context = compression.compress(tensor)
    reduced = _AllReduce.apply(compressed, chosen, prescale_factor, postscale_factor)  # type: ignore[no-untyped-call]
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Op, before: float, after: float) -> Any:
        ctx.options = (op, before, after)
        return allreduce_async(tensor, None, None, op, before, after).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return allreduce_async(gradients[0], None, None, *ctx.options).wait(), None, None, None


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Start to gather tensors that may differ in their first dimension.

    The lengths travel first, and this call waits for them.

    Args:
        tensor: of one dimension at least; the others are equal on all ranks.
        name: not used.

    Raises:
        ValueError: the tensor has no dimension.
    """
    places()
    if tensor.dim() == 0:
        raise ValueError(
            "allgather joins tensors along their first dimension, and a scalar has none"
        )
    own = tensor.detach().contiguous()
    lengths = [torch.zeros(1, dtype=torch.long, device="cpu") for _ in range(size())]
    dist.all_gather(lengths, torch.tensor([own.shape[0]], dtype=torch.int64, device="cpu"))
    parts = [own.new_empty((int(length), *own.shape[1:])) for length in lengths]
    work = dist.all_gather(parts, own, async_op=True)
    return Handle([work], lambda: torch.cat(parts))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return all ranks' tensors, one behind the other along the first dimension, in rank order.

    Args:
        tensor: of one dimension at least; the first may differ between ranks, the others not.
        name: not used.
    """
    result: torch.Tensor = _AllGather.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        ctx.length = tensor.shape[0] if tensor.dim() else 0
        return allgather_async(tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = allreduce_async(gradients[0], op=Op.Sum).wait()
        lengths = allgather_async(
            torch.tensor([ctx.length], dtype=torch.int64, device="cpu")
        ).wait()
        begin = int(lengths[: dist.get_rank()].sum())
        return summed[begin : begin + ctx.length]


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to overwrite a tensor by that of `root_rank`."""
    places()
    flat = tensor.detach()
    values = flat if flat.is_contiguous() else flat.contiguous()
    work = dist.broadcast(values, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if values is not flat:
            flat.copy_(values)
        return tensor

    return Handle([work], finish)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to send the tensor of `root_rank` to all; the result is a new tensor."""
    return broadcast_async_(tensor.detach().clone(), root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite a tensor by that of `root_rank`."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank).wait()
    return result


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of `root_rank`; of the same shape and dtype on all ranks.

    Gradients flow to the tensor of `root_rank`, as their sum.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank)  # type: ignore[no-untyped-call]
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> Any:
        ctx.root = root_rank
        return broadcast_async(tensor, root_rank).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = allreduce_async(gradients[0], op=Op.Sum).wait()
        return summed if dist.get_rank() == ctx.root else torch.zeros_like(summed), None


def barrier() -> None:
    """Wait until all ranks have called it."""
    places()
    dist.barrier()
