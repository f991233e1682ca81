"""Horovod's collectives on tensors of any device, each as a function and as a handle.

All ranks make the same calls in one order (calls.py). A function that waits
compares the call first, so that an error leaves the group as it was; an asynchronous one sends the
comparison along, and `synchronize` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arguments import typed
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.horovod.basics import size
from pycomm.horovod.calls import Call, Handle
from pycomm.policy import Policy


class Op(Enum):
    """What a reduction calculates."""

    Average = dist.ReduceOp.AVG
    Sum = dist.ReduceOp.SUM
    Min = dist.ReduceOp.MIN
    Max = dist.ReduceOp.MAX
    Product = dist.ReduceOp.PRODUCT
    Adasum = "adasum"
    """not supported: an error that says what to use"""


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product
Adasum = Op.Adasum


@dataclass(frozen=True)
class Coded:
    """A codec of pycomm with its feedback, for `DistributedOptimizer`."""

    policy: Policy
    feedback: bool | str | Feedback = True


class _Uncompressed:
    """Gradients travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor


class _Half:
    """Floats travel in 16 bits, and are summed in 16 bits by `allreduce`."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class Compression:
    """Choices for the argument `compression`; Horovod's `none` and `fp16`, and any codec."""

    none = _Uncompressed
    """exact"""
    fp16 = _Half
    """16 bits; a `DistributedOptimizer` sums in float32, and rounds once more"""

    @staticmethod
    def codec(codec: str | Policy = "int4", *, feedback: bool | str | Feedback = True) -> Coded:
        """Return a codec of pycomm for `DistributedOptimizer`: Compression.codec("int4").

        Args:
            codec: a codec or policy, as for `pycomm.compress`.
            feedback: error feedback, as for `pycomm.compress`.

        Raises:
            ValueError: an unknown codec, or bad options.
        """
        typed("codec", codec, str, Policy)
        return Coded(Policy.of(codec), feedback)


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result."""
    typed("handle", handle, Handle)
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return at once."""
    typed("handle", handle, Handle)
    return handle.is_completed()


def _start(
    name: str | None,
    text: str,
    launch: Callable[[Call, list[int]], tuple[Any, Callable[[], Any]]],
    *,
    waits: bool,
    number: int = 0,
) -> Handle:
    """Start an operation.

    Args:
        name: the user's name.
        text: of the call.
        launch: starts it; gets the call and, if it waits, all ranks' numbers; returns the
            operation and a function that returns the result.
        waits: the ranks compare the call before it starts.
        number: of this rank, without which the others cannot start.
    """
    call = Call(f"{text} called {name!r}" if name else text, number)
    if waits:
        return Handle(None, *launch(call, call.check()))
    return Handle(call, *launch(call, []))


def _named(tensor: torch.Tensor, rows: bool = False) -> str:
    """Return dtype and shape of a tensor as text, as of one of any length if `rows`."""
    shape = [*("any" if rows else str(n) for n in tensor.shape[:1]), *map(str, tensor.shape[1:])]
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(shape)}]"


class _Differentiable(torch.autograd.Function):
    """A function of a tensor without gradients, and what makes its gradient of the result's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, move: Any, gradient_of: Any) -> Any:
        ctx.gradient_of = gradient_of
        return move(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.gradient_of(gradients[0]), None, None


def _differentiable(
    tensor: torch.Tensor,
    move: Callable[[torch.Tensor], torch.Tensor],
    gradient_of: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    result: torch.Tensor = _Differentiable.apply(tensor, move, gradient_of)  # type: ignore[no-untyped-call]
    return result


# ------------------------------------------------------------------------------- reductions


def _op(op: Op | None, average: bool | None) -> Op:
    if op is not None and average is not None:
        raise ValueError("op= and average= say the same: give op=, since average= is deprecated")
    if op is None:
        return Op.Sum if average is False else Op.Average
    typed("op", op, Op)
    if op is Op.Adasum:
        raise Error(
            "Adasum is not supported: use op=hvd.Average, or pycomm.LocalSGD(model, every=...) for "
            "rare averages"
        )
    return op


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:  # towards zero, as Horovod scales integers
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def _allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    waits: bool,
) -> Handle:
    op = _op(op, average)
    place = tensor.detach()  # parameters are written as well
    flat = place.contiguous()
    factors = float(prescale_factor), float(postscale_factor)  # whatever kind of number ranks give

    def launch(call: Call, _: list[int]) -> tuple[Any, Callable[[], Any]]:
        whole = not (flat.dtype.is_floating_point or flat.dtype.is_complex)
        # Averages of integers, and sums of them that are scaled, are made in int64.
        wide = whole and (op is Op.Average or (op is Op.Sum and factors != (1.0, 1.0)))
        sent = flat.to(torch.int64, copy=True) if wide else flat
        _scale(sent, factors[0])

        def finish() -> torch.Tensor:
            factor = factors[1]
            if op is Op.Average and whole:
                sent.div_(call.size, rounding_mode="trunc")
            elif op is Op.Average:
                factor /= call.size
            _scale(sent, factor)
            result = sent.to(place.dtype)
            if result is not place:
                place.copy_(result)
            return tensor

        reduction = dist.ReduceOp.SUM if op is Op.Average else op.value
        return dist.all_reduce(sent, reduction, async_op=True), finish

    text = f"allreduce ({op.name}, scaled by {factors}) of {_named(tensor)}"
    return _start(name, text, launch, waits=waits)


def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce in place.

    Args:
        tensor: of the same shape and dtype on all ranks.
        args, kwargs: average, name, op, prescale_factor, postscale_factor, as of `allreduce`.

    Raises:
        ValueError: both op and average are given.
        Error: there is no group, or op is Adasum.
    """
    return _allreduce_(tensor, *args, waits=False, **kwargs)


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce whose result is a new tensor; see `allreduce_async_`."""
    return allreduce_async_(tensor.detach().clone(), *args, **kwargs)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """All-reduce in place; the arguments are those of `allreduce_async_`."""
    result: torch.Tensor = _allreduce_(tensor, *args, waits=True, **kwargs).wait()
    return result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the average over the ranks, or another reduction; the tensor stays as it is.

    If the tensor requires gradients, so does the result; the gradient is reduced the same way,
    which is right for Average and Sum.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: deprecated; True: op=Average, False: op=Sum.
        name: the same on all ranks; None: ranks compare only what is reduced.
        compression: Compression.none, fp16, or an object with Horovod's `compress` and
            `decompress`.
        op: None means Average, which rounds integers towards zero.
        prescale_factor: factor of each rank's values before they are reduced.
        postscale_factor: factor of the result.

    Raises:
        ValueError: both op and average are given.
        WireMismatch: another rank makes another call; the group can be used on.
        Error: there is no group, the compression is a codec, op is Adasum, or gradients would
            have to flow through Min, Max or Product.
    """
    if isinstance(compression, Coded):
        raise Error(
            "Compression.codec is for DistributedOptimizer, which keeps what a codec loses: use "
            "Compression.none or fp16 for a single reduction"
        )
    chosen = _op(op, average)
    if tensor.requires_grad and chosen not in (Op.Average, Op.Sum):
        raise Error(f"no gradients flow through {chosen.name}: detach the tensor first")
    compressed, context = compression.compress(tensor)
    options = (chosen, prescale_factor, postscale_factor)

    def reduce(values: torch.Tensor, name: str | None = None) -> Any:
        return _allreduce_(values.clone(), None, name, *options, waits=True).wait()

    reduced = _differentiable(compressed, lambda values: reduce(values, name), reduce)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


# ------------------------------------------------------------------------------- moves


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Start to gather tensors that may differ in their first dimension.

    The lengths travel first, and this call waits for them.

    Args:
        tensor: the dimensions after the first are equal on all ranks; a scalar is one row.
        name: the same on all ranks, or None.

    Raises:
        WireMismatch: another rank makes another call; the group can be used on.
    """
    own = tensor.detach().contiguous()
    own = own if own.dim() else own.view(1)

    def launch(call: Call, lengths: list[int]) -> tuple[Any, Callable[[], Any]]:
        parts = [own.new_empty((length, *own.shape[1:])) for length in lengths]
        work = dist.all_gather(parts, own, async_op=True)
        return work, lambda: torch.cat(parts)

    text = f"allgather of {_named(own, rows=True)}"
    return _start(name, text, launch, waits=True, number=own.shape[0])


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return all ranks' tensors, one behind the other along the first dimension, in rank order.

    Gradients flow back averaged over the ranks, as Horovod's do.

    Args:
        tensor: the first dimension may differ between ranks, the others not; a scalar is one row.
        name: the same on all ranks, or None.
    """
    shape = tensor.shape
    return _differentiable(
        tensor,
        lambda values: allgather_async(values, name).wait(),
        lambda gradient: _own_rows(gradient, shape[0] if shape else 1).view(shape),
    )


def _own_rows(gradient: torch.Tensor, length: int) -> torch.Tensor:
    """Return this rank's rows of the average gradient."""
    averaged: torch.Tensor = allreduce(gradient)
    begin = sum(Call("the gradient of an allgather", length).check()[: dist.get_rank()])
    return averaged[begin : begin + length]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, waits: bool = False
) -> Handle:
    """Start to overwrite a tensor by that of `root_rank`, a rank of the job.

    With `waits` the ranks compare the call first.

    Raises:
        ValueError: root_rank is no rank of the job.
    """
    if not 0 <= root_rank < size():
        raise ValueError(f"root_rank={root_rank} is no rank of this job of {size()} ranks")
    flat = tensor.detach()
    values = flat if flat.is_contiguous() else flat.contiguous()

    def launch(call: Call, _: list[int]) -> tuple[Any, Callable[[], Any]]:
        work = dist.broadcast(values, root_rank, async_op=True)

        def finish() -> torch.Tensor:
            if values is not flat:
                flat.copy_(values)
            return tensor

        return work, finish

    text = f"broadcast from rank {root_rank} of {_named(tensor)}"
    return _start(name, text, launch, waits=waits)


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to send the tensor of `root_rank` to all; the result is a new tensor."""
    return broadcast_async_(tensor.detach().clone(), *args, **kwargs)


def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Overwrite a tensor by that of `root_rank`; the arguments are those of `broadcast`."""
    result: torch.Tensor = broadcast_async_(tensor, *args, waits=True, **kwargs).wait()
    return result


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of `root_rank`; of the same shape and dtype on all ranks.

    Gradients flow to the tensor of `root_rank`, averaged over the ranks, as Horovod's do.

    Raises:
        ValueError: root_rank is no rank of the job.
        WireMismatch: another rank makes another call; the group can be used on.
    """

    def own(gradient: torch.Tensor) -> torch.Tensor:
        averaged = allreduce(gradient)
        return averaged if dist.get_rank() == root_rank else torch.zeros_like(averaged)

    return _differentiable(tensor, lambda values: broadcast_(values.clone(), root_rank, name), own)


def barrier() -> None:
    """Wait until all ranks have called it."""
    Call("barrier").check()
