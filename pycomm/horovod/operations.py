"""Horovod's collectives on tensors of any device, each as a function and as a handle.

All ranks of a process set make the same calls in one order (calls.py). A function that waits
compares the call first, so that an error leaves the group as it was; an asynchronous one sends the
comparison along, and `synchronize` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arguments import typed
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.horovod.calls import Call, Handle
from pycomm.horovod.process_sets import ProcessSet, global_process_set
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
    process_set: ProcessSet,
    name: str | None,
    text: str,
    launch: Callable[[Call, list[list[int]]], tuple[Sequence[Any], Callable[[], Any]]],
    *,
    waits: bool,
    numbers: Sequence[int] = (),
) -> Handle:
    """Start an operation.

    Args:
        process_set: the ranks.
        name: the user's name.
        text: of the call.
        launch: starts it; gets the call and, if it waits, the numbers of all ranks; returns works
            and a function that returns the result.
        waits: the ranks compare the call before it starts.
        numbers: of this rank, without which the others cannot start.
    """
    call = Call(process_set, f"{text} called {name!r}" if name else text, numbers)
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
    op: Op = Op.Average,
) -> torch.Tensor:
    if tensor.requires_grad and op not in (Op.Average, Op.Sum):
        raise Error(f"no gradients flow through {op.name}: detach the tensor first")
    result: torch.Tensor = _Differentiable.apply(tensor, move, gradient_of)  # type: ignore[no-untyped-call]
    return result


# ------------------------------------------------------------------------------- reductions


def _op(op: Op | None, average: bool | None = None) -> Op:
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


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _summand(tensor: torch.Tensor, op: Op, factors: tuple[float, float]) -> torch.Tensor:
    """Return what a rank contributes to a reduction: its values, scaled in place.

    Averages of integers, and sums of them that are scaled, are made in int64.
    """
    if _is_whole(tensor) and (op is Op.Average or (op is Op.Sum and factors != (1.0, 1.0))):
        tensor = tensor.to(torch.int64, copy=True)
    _scale(tensor, factors[0])
    return tensor


def _finished(
    values: torch.Tensor, like: torch.dtype, op: Op, ranks: int, factor: float
) -> torch.Tensor:
    """Return the result of a reduction, which may be `values`.

    Args:
        values: the ranks' sum of what `_summand` returned, or another reduction.
        like: dtype of the result.
        op: the reduction.
        ranks: their number.
        factor: of the result.
    """
    if op is Op.Average and _is_whole(values):
        values.div_(ranks, rounding_mode="trunc")
    elif op is Op.Average:
        factor /= ranks
    _scale(values, factor)
    return values.to(like)


def _reduction(op: Op) -> Any:
    return dist.ReduceOp.SUM if op is Op.Average else op.value


def _allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    waits: bool,
) -> Handle:
    op = _op(op, average)
    places = [tensor.detach() for tensor in tensors]  # parameters are written as well
    flat = [place.contiguous() for place in places]
    factors = float(prescale_factor), float(postscale_factor)  # whatever kind of number ranks give

    def launch(call: Call, _: list[list[int]]) -> tuple[Sequence[Any], Callable[[], Any]]:
        sent = [_summand(tensor, op, factors) for tensor in flat]
        reduction = _reduction(op)
        works = [dist.all_reduce(t, reduction, group=call.group, async_op=True) for t in sent]

        def finish() -> list[torch.Tensor]:
            for place, values in zip(places, sent, strict=True):
                result = _finished(values, place.dtype, op, call.size, factors[1])
                if result is not place:
                    place.copy_(result)
            return list(tensors)

        return works, finish

    text = f"allreduce ({op.name}, scaled by {factors}) of {', '.join(map(_named, tensors))}"
    return _start(process_set, name, text, launch, waits=waits)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce of several tensors in place; the arguments are those of `allreduce`.

    Args:
        tensors: of the same shapes and dtypes on all ranks.
        args, kwargs: average, name, op, prescale_factor, postscale_factor, process_set.

    Raises:
        ValueError: both op and average are given.
        Error: there is no group, or op is Adasum.
    """
    return _allreduce_(tensors, *args, waits=False, **kwargs)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """All-reduce several tensors in place; see `grouped_allreduce_async_`."""
    return list(_allreduce_(tensors, *args, waits=True, **kwargs).wait())


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce of several tensors, whose results are new tensors."""
    return grouped_allreduce_async_([t.detach().clone() for t in tensors], *args, **kwargs)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """All-reduce several tensors and return the results; gradients flow through, as `allreduce`."""
    return [allreduce(t, average, part, *args, **kwargs) for t, part in _parts(tensors, name)]


def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce in place; the arguments are those of `grouped_allreduce_async_`."""
    return _single(grouped_allreduce_async_([tensor], *args, **kwargs))


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start an all-reduce whose result is a new tensor."""
    return _single(grouped_allreduce_async([tensor], *args, **kwargs))


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """All-reduce in place; the arguments are those of `grouped_allreduce_async_`."""
    return grouped_allreduce_([tensor], *args, **kwargs)[0]


def _single(handle: Handle) -> Handle:
    return Handle(None, [handle], lambda: handle.wait()[0])


def _parts(
    tensors: Sequence[torch.Tensor], name: str | None
) -> list[tuple[torch.Tensor, str | None]]:
    return [(tensor, f"{name}.{n}" if name else None) for n, tensor in enumerate(tensors)]


def _all(handles: Sequence[Handle]) -> Handle:
    return Handle(None, handles, lambda: [handle.wait() for handle in handles])


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
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
        process_set: the ranks.

    Raises:
        ValueError: both op and average are given.
        WireMismatch: another rank makes another call; the group can be used on.
        Error: there is no group, the compression is a codec, op is Adasum, or gradients would
            have to flow through Min, Max or Product.
    """
    _refuse_codec(compression)
    chosen = _op(op, average)
    compressed, context = compression.compress(tensor)
    options = (chosen, prescale_factor, postscale_factor, process_set)

    def reduce(values: torch.Tensor, name: str | None = None) -> Any:
        return _allreduce_([values.clone()], None, name, *options, waits=True).wait()[0]

    reduced = _differentiable(compressed, lambda values: reduce(values, name), reduce, chosen)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def _refuse_codec(compression: Any) -> None:
    if isinstance(compression, Coded):
        raise Error(
            "Compression.codec is for DistributedOptimizer, which keeps what a codec loses: use "
            "Compression.none or fp16 for a single reduction"
        )


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to sum sparse tensors of the ranks, by gathering their indices and values.

    Args:
        tensor: a sparse COO tensor of the same shape on all ranks.
        name: the same on all ranks, or None.
        op: Average (None) or Sum.
        process_set: the ranks.

    Returns:
        A function that waits, and returns the sparse result.
    """
    chosen = _op(op)
    if chosen not in (Op.Average, Op.Sum):
        raise Error(f"sparse tensors can be averaged or summed, not reduced by {chosen.name}")
    own = tensor.detach().coalesce()
    indices = allgather_async(own.indices().t().contiguous(), name and f"{name}.i", process_set)
    values = allgather_async(own.values(), name and f"{name}.v", process_set)

    def result() -> torch.Tensor:
        ranks = len(process_set.ranks)
        where, what = indices.wait().t(), _summand(values.wait(), chosen, (1.0, 1.0))
        summed = torch.sparse_coo_tensor(where, what, tensor.shape).coalesce()
        results = _finished(summed.values(), tensor.dtype, chosen, ranks, 1.0)
        places = summed.indices()
        return torch.sparse_coo_tensor(places, results, tensor.shape, is_coalesced=True)

    return result


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    waits: bool = False,
) -> Handle:
    """Start a reduction of which each rank gets a part; the arguments are `reducescatter`'s.

    With `waits` the ranks compare the call first.
    """
    chosen, factors = _op(op), (float(prescale_factor), float(postscale_factor))
    if tensor.dim() == 0:
        raise ValueError("reducescatter cuts the first dimension, and a scalar has none")

    def launch(call: Call, _: list[list[int]]) -> tuple[Sequence[Any], Callable[[], Any]]:
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        own = _summand(own, chosen, factors)
        rows, more = divmod(own.shape[0], call.size)
        if more == 0:
            out = own.new_empty((rows, *own.shape[1:]))
            reduction = _reduction(chosen)
            scatter = dist.reduce_scatter_tensor
            work = scatter(out, own, reduction, group=call.group, async_op=True)
        else:  # the first ranks get a row more
            work = dist.all_reduce(own, _reduction(chosen), group=call.group, async_op=True)
            rank = dist.get_rank(call.group)
            begin = rank * rows + min(rank, more)
            out = own[begin : begin + rows + (rank < more)]

        def finish() -> torch.Tensor:
            result = out.clone() if more else out
            return _finished(result, tensor.dtype, chosen, call.size, factors[1])

        return [work], finish

    text = f"reducescatter ({chosen.name}, scaled by {factors}) of {_named(tensor)}"
    return _start(process_set, name, text, launch, waits=waits)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce tensors, and return this rank's rows of the result.

    Rows are shared out in rank order; where they do not divide evenly, the first ranks get one
    more. Gradients flow through Average and Sum as through Horovod's, whose gradient of a sum is
    multiplied by the number of ranks.

    Args:
        tensor: of one dimension at least, of the same shape and dtype on all ranks.
        name: the same on all ranks, or None.
        compression: as of `allreduce`.
        op: None means Average.
        process_set: the ranks.
        prescale_factor: factor of each rank's values before they are reduced.
        postscale_factor: factor of the result.

    Raises:
        ValueError: the tensor has no dimension.
        WireMismatch: another rank makes another call; the group can be used on.
        Error: there is no group, the compression is a codec, op is Adasum, or gradients would
            have to flow through Min, Max or Product.
    """
    _refuse_codec(compression)
    chosen = _op(op)
    compressed, context = compression.compress(tensor)
    options = chosen, process_set, prescale_factor, postscale_factor

    def gathered(gradient: torch.Tensor) -> Any:
        factor = prescale_factor * postscale_factor
        factor *= len(process_set.ranks) if chosen is Op.Sum else 1
        return allgather_async(gradient * factor, None, process_set).wait()

    reduced = _differentiable(
        compressed,
        lambda values: reducescatter_async(values, name, *options, waits=True).wait(),
        gathered,
        chosen,
    )
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, *args: Any, **kwargs: Any
) -> Handle:
    """Start several reductions of which each rank gets a part."""
    return _all([reducescatter_async(t, n, *args, **kwargs) for t, n in _parts(tensors, name)])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """Reduce several tensors, and return this rank's rows of each; see `reducescatter`."""
    return [reducescatter(t, n, *args, **kwargs) for t, n in _parts(tensors, name)]


# ------------------------------------------------------------------------------- moves


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather tensors that may differ in their first dimension.

    The lengths travel first, and this call waits for them.

    Args:
        tensor: the dimensions after the first are equal on all ranks; a scalar is one row.
        name: the same on all ranks, or None.
        process_set: the ranks.

    Raises:
        WireMismatch: another rank makes another call; the group can be used on.
    """
    own = tensor.detach().contiguous()
    own = own if own.dim() else own.view(1)

    def launch(call: Call, numbers: list[list[int]]) -> tuple[Sequence[Any], Callable[[], Any]]:
        parts = [own.new_empty((length[0], *own.shape[1:])) for length in numbers]
        work = dist.all_gather(parts, own, group=call.group, async_op=True)
        return [work], lambda: torch.cat(parts)

    text = f"allgather of {_named(own, rows=True)}"
    return _start(process_set, name, text, launch, waits=True, numbers=[own.shape[0]])


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return all ranks' tensors, one behind the other along the first dimension, in rank order.

    Gradients flow back averaged over the ranks, as Horovod's do.

    Args:
        tensor: the first dimension may differ between ranks, the others not; a scalar is one row.
        name: the same on all ranks, or None.
        process_set: the ranks.
    """
    shape = tensor.shape
    return _differentiable(
        tensor,
        lambda values: allgather_async(values, name, process_set).wait(),
        lambda gradient: _own_rows(gradient, shape[0] if shape else 1, process_set).view(shape),
    )


def _own_rows(gradient: torch.Tensor, length: int, process_set: ProcessSet) -> torch.Tensor:
    """Return this rank's rows of the average gradient."""
    averaged: torch.Tensor = allreduce(gradient, process_set=process_set)
    own = torch.tensor([length], dtype=torch.int64, device="cpu")
    lengths = allgather_async(own, None, process_set).wait()
    begin = int(lengths[: process_set.rank()].sum())
    return averaged[begin : begin + length]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to gather several tensors; see `allgather_async`."""
    return _all([allgather_async(t, n, process_set) for t, n in _parts(tensors, name)])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors; see `allgather`."""
    return [allgather(t, n, process_set) for t, n in _parts(tensors, name)]


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    waits: bool = False,
) -> Handle:
    """Start to overwrite a tensor by that of `root_rank`, a rank of the job.

    With `waits` the ranks compare the call first.

    Raises:
        ValueError: root_rank is not in the process set.
    """
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank={root_rank} is not in {process_set}")
    flat = tensor.detach()
    values = flat if flat.is_contiguous() else flat.contiguous()

    def launch(call: Call, _: list[list[int]]) -> tuple[Sequence[Any], Callable[[], Any]]:
        work = dist.broadcast(values, root_rank, group=call.group, async_op=True)

        def finish() -> torch.Tensor:
            if values is not flat:
                flat.copy_(values)
            return tensor

        return [work], finish

    text = f"broadcast from rank {root_rank} of {_named(tensor)}"
    return _start(process_set, name, text, launch, waits=waits)


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to send the tensor of `root_rank` to all; the result is a new tensor."""
    return broadcast_async_(tensor.detach().clone(), *args, **kwargs)


def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Overwrite a tensor by that of `root_rank`; the arguments are those of `broadcast`."""
    result: torch.Tensor = broadcast_async_(tensor, *args, waits=True, **kwargs).wait()
    return result


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of `root_rank`; of the same shape and dtype on all ranks.

    Gradients flow to the tensor of `root_rank`, averaged over the ranks, as Horovod's do.

    Raises:
        ValueError: root_rank is not in the process set.
        WireMismatch: another rank makes another call; the group can be used on.
    """

    def own(gradient: torch.Tensor) -> torch.Tensor:
        averaged = allreduce(gradient, process_set=process_set)
        return averaged if dist.get_rank() == root_rank else torch.zeros_like(averaged)

    return _differentiable(
        tensor, lambda values: broadcast_(values.clone(), root_rank, name, process_set), own
    )


def _alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Handle:
    """Start an exchange whose result is a tensor, and the rows that came from each rank."""
    ranks = len(process_set.ranks)
    if tensor.dim() == 0:
        raise ValueError("alltoall cuts the first dimension, and a scalar has none")
    if splits is None:
        if tensor.shape[0] % ranks:
            raise ValueError(
                f"alltoall without splits cuts the first dimension into {ranks} equal parts, and "
                f"{tensor.shape[0]} rows do not divide evenly: pass splits"
            )
        given = [tensor.shape[0] // ranks] * ranks
    else:
        if isinstance(splits, torch.Tensor) and splits.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"splits are integers, not {splits.dtype}")
        given = [int(n) for n in splits]
    if len(given) != ranks or min(given) < 0 or sum(given) != tensor.shape[0]:
        raise ValueError(
            f"splits={given} are to cut {tensor.shape[0]} rows into {ranks} parts, one for a rank"
        )
    own = tensor.detach().contiguous()

    def launch(call: Call, numbers: list[list[int]]) -> tuple[Sequence[Any], Callable[[], Any]]:
        taken = [row[dist.get_rank(call.group)] for row in numbers]
        out = own.new_empty((sum(taken), *own.shape[1:]))
        work = dist.all_to_all_single(out, own, taken, given, group=call.group, async_op=True)
        like = splits if isinstance(splits, torch.Tensor) else None
        device = like.device if like is not None else torch.device("cpu")
        received = torch.tensor(taken, dtype=torch.int32, device=device)
        return [work], lambda: (out, received)

    text = f"alltoall of {_named(tensor, rows=True)}"
    return _start(process_set, name, text, launch, waits=True, numbers=given)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send rows of a tensor to each rank; the result is as that of `alltoall`.

    The splits travel first, and this call waits for them.
    """
    handle = _alltoall(tensor, splits, name, process_set)
    return handle if splits is not None else Handle(None, [handle], lambda: handle.wait()[0])


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of a tensor to each rank, and return those that the ranks have sent to this one.

    Args:
        tensor: of one dimension at least; the others are equal on all ranks.
        splits: the rows for each rank, in rank order; None: equally many.
        name: the same on all ranks, or None.
        process_set: the ranks.

    Returns:
        The rows, in rank order; with splits also the number that came from each rank.

    Raises:
        ValueError: the splits do not fit the tensor.
        WireMismatch: another rank makes another call; the group can be used on.
    """
    received: Any = None

    def move(values: torch.Tensor) -> Any:
        nonlocal received
        rows, received = _alltoall(values, splits, name, process_set).wait()
        return rows

    rows = _differentiable(
        tensor,
        move,
        lambda gradient: _alltoall(gradient, received.tolist(), None, process_set).wait()[0],
    )
    return rows if splits is None else (rows, received)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it."""
    Call(process_set, "barrier").check()
