"""The communication hook for DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from pycomm import backend
from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.policy import Policy
from pycomm.policy.exchange import gather
from pycomm.policy.names import clean, matching
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.own_group import ExchangeThread
from pycomm.reduction.reducer import BucketReducer
from pycomm.reduction.refusals import DDP
from pycomm.reduction.state import CompressionState
from pycomm.reduction.step import StepStatus
from pycomm.reduction.taken import DiscardedGradients

Future = torch.futures.Future[torch.Tensor]
Names = tuple[str, ...]


def HookState(
    codec: str | Codec | Policy,
    model: DistributedDataParallel,
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> CompressionState:
    """Return the state that `compress_hook` keeps between steps.

    Args:
        codec: a codec, a `Policy`, or the text of either; see `CompressionState`.
        model: the DDP model.
        process_group: the ranks that reduce; None: the model's group.
        options: feedback, seed and others; see `CompressionState`.

    Example:
        >>> import pycomm
        >>> state = pycomm.HookState("int4", model)  # doctest: +SKIP
        >>> model.register_comm_hook(state, pycomm.compress_hook)  # doctest: +SKIP
    """
    typed("model", model, DistributedDataParallel)
    hooks = DDPHooks(model)
    adapter = Adapter(
        DDP,
        defers=True,
        ignored=frozenset(map(clean, model.parameters_to_ignore)),
        reduce_bucket=hooks.reduce_bucket,
        unused=hooks.unused,
        rebuilds=hooks.rebuilds,
        saved=hooks.saved,
        loaded=hooks.loaded,
    )
    group = process_group or model.process_group
    state = CompressionState(codec, process_group=group, adapter=adapter, **options)
    hooks.enter(state)
    return state


class SavedBuckets:
    """Reduces one step by the buckets that a checkpoint names, whatever DDP's own are.

    DDP makes new buckets after its first backward (with static_graph after two), and a bucket
    decides which values each rank owns. A state that was saved after that belongs to the final
    buckets, and is loaded before they exist.

    From the first bucket on that differs, buckets are kept until the last one of the step. If they
    are not of the same values in all, or of one dtype and device each, they are reduced as DDP made
    them. All of it is decided by what is equal on all ranks: DDP's buckets and the saved names.

    Args:
        saved: names of each bucket's parameters, in the order of reduction.
        numel: function that returns the number of values of a parameter.
        reduce: function that averages a bucket in place.
        wait: function that waits for a future of `reduce`.
    """

    def __init__(
        self,
        saved: Sequence[Names],
        numel: Callable[[str], int],
        reduce: Callable[[torch.Tensor, Names], Future],
        wait: Callable[[Future], object],
    ) -> None:
        self._saved = list(saved)
        self._numel, self._reduce, self._wait = numel, reduce, wait
        self._held: list[tuple[torch.Tensor, Names, Future]] = []

    def reduce(self, tensor: torch.Tensor, names: Names, *, last: bool) -> Future:
        """Average a bucket of DDP, in place; with the last one wait for those that were kept.

        Args:
            tensor: the gradients of the named parameters, one behind the other.
            names: its parameters.
            last: it is the last bucket of the step.

        Raises:
            Error: a reduction failed. The backward raises it, and waits for no bucket.
        """
        if not self._held and self._saved[:1] == [names]:
            del self._saved[0]
            return self._reduce(tensor, names)
        devices: list[int | str | torch.device] = [] if tensor.is_cpu else [tensor.device]
        future: Future = torch.futures.Future(devices=devices)
        self._held.append((tensor, names, future))
        if last:
            self._reduce_held()
        return future

    def _reduce_held(self) -> None:
        parts = self._parts()
        if parts is None:
            for reduction in [self._reduce(tensor, names) for tensor, names, _ in self._held]:
                self._wait(reduction)
        else:
            places = [[parts[name] for name in names] for names in self._saved]
            buckets = list(map(torch.cat, places))
            for reduction in list(map(self._reduce, buckets, self._saved)):
                self._wait(reduction)
            for bucket, theirs in zip(buckets, places, strict=True):
                values = torch.split(bucket, [place.numel() for place in theirs])
                torch._foreach_copy_(theirs, values)
        for tensor, _, future in self._held:
            future.set_result(tensor)

    def _parts(self) -> dict[str, torch.Tensor] | None:
        """Return each parameter's values; None: they cannot be reduced by the saved buckets."""
        parts: dict[str, torch.Tensor] = {}
        for tensor, names, _ in self._held:
            sizes = [self._numel(name) for name in names]
            if tensor.is_sparse or sum(sizes) != tensor.numel():
                return None
            parts.update(zip(names, torch.split(tensor.view(-1), sizes), strict=True))
        if sorted(name for names in self._saved for name in names) != sorted(parts):
            return None
        for names in self._saved:
            if len({(parts[name].dtype, parts[name].device) for name in names}) > 1:
                return None
        return parts


class DDPHooks:
    """What `compress_hook` does for a state of a DDP model.

    Args:
        model: the DDP model.
    """

    reducer: BucketReducer

    def __init__(self, model: DistributedDataParallel) -> None:
        # Weak: the model's reducer holds this in C++, where the garbage collector cannot see a
        # cycle.
        self._model = weakref.ref(model)
        self._sparse = _sparse(model.module)
        self._settles: Any = None  # the handle of the forward hook `_settle_joined`
        self._order: list[Names] = []  # the last step's buckets, as they were reduced
        self._loaded_order: list[Names] = []  # the buckets of a loaded state,
        self._by_loaded = 0  # by which so many steps are still reduced
        self._saved_buckets: SavedBuckets | None = None  # in such a step

    def enter(self, state: CompressionState) -> None:
        """Enter the model's parameters; collective."""
        self.reducer = reducer = state.reducer
        model = self._model()
        assert model is not None
        # The order is that of DDP's reducer, which has no frozen or ignored parameters.
        reduced = model._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        ids = set(map(id, reduced))
        for name, parameter in model.module.named_parameters():
            if id(parameter) in ids:
                self._enter(name, parameter)
        if reduced:
            device = reduced[0].device
            reducer.find_nodes(device)
            if self._may_use_thread(device):
                reducer.thread = ExchangeThread(reducer.process_group)
        if state.residuals:
            state.discarded = DiscardedGradients(reducer.names, reducer.by_name)
        self._reduced = [reducer.names[id(parameter)] for parameter in reduced]

    def _may_use_thread(self, device: torch.device) -> bool:
        """Return whether another backend than pycomm moves host tensors of all ranks; collective.

        NCCL and its like let streams wait, and the hook's thread queues their operations.
        """
        group = self.reducer.process_group
        if group.size() == 1 or backend.find(group) is not None:
            return False
        here = [device.type == "cpu"]
        return all(there for (there,) in gather(here, group, device))

    def reduce_bucket(self, state: CompressionState, bucket: GradBucket) -> Future:
        """Average a DDP bucket over the group; see `compress_hook`."""
        reducer = self.reducer
        if bucket.index() == 0:
            joined = torch._C._current_graph_task_id() == -1
            state.begin_step(joined=joined)
            self._order = []
            self._saved_buckets = self._take_loaded()
            if joined and not self._settles and (model := self._looks_for_unused()):
                self._settles = model.register_forward_pre_hook(_settle_joined, prepend=True)
        parameters = bucket.parameters()
        for parameter in parameters:
            if id(parameter) not in reducer.names:
                self._enter(self._new_name(parameter), parameter)
        names = tuple(map(reducer.names.__getitem__, map(id, parameters)))
        if self._saved_buckets is not None:
            try:
                future = self._saved_buckets.reduce(bucket.buffer(), names, last=bucket.is_last())
            except BaseException:
                reducer.step.status, self._saved_buckets = StepStatus.ROLLED_BACK, None
                raise
        else:
            self._order.append(names)
            future = (reducer.transform or reducer).reduce(bucket.buffer(), names)
        if bucket.is_last():
            state.end_step()
            self._saved_buckets = None
            if not reducer.step.joined and self._looks_for_unused() is not None:
                # Queued twice: DDP queues the callback that ends the backward after this one, and
                # the look must come after that.
                queue = torch.autograd.Variable._execution_engine.queue_callback
                queue(lambda: queue(self._look_for_unused))
        return future

    def _reduce_named(self, tensor: torch.Tensor, names: Names) -> Future:
        """Reduce a bucket, and record it for checkpoints."""
        self._order.append(names)
        return (self.reducer.transform or self.reducer).reduce(tensor, names)

    def _take_loaded(self) -> SavedBuckets | None:
        """Return the buckets of a loaded state, if this step is reduced by them."""
        if not self._by_loaded:
            return None
        self._by_loaded -= 1

        def numel(name: str) -> int:
            return self.reducer.plan.decisions[name].parameter.numel

        return SavedBuckets(self._loaded_order, numel, self._reduce_named, self.reducer.wait)

    def saved(self) -> dict[str, Any]:
        """See `Adapter`. Residuals of owners belong to the buckets of the last step."""
        return {"buckets": [list(names) for names in self._order]}

    def loaded(self, about: Mapping[str, Any]) -> None:
        """See `Adapter`. The next steps are reduced by the buckets of the saved one.

        After a change of members each has buckets of its own DDP, which are compared.
        """
        self._by_loaded = 0
        if not about:
            return
        order = about.get("buckets", ())  # a state of FSDP2 has none
        here = matching([name for names in order for name in names], self.reducer.numbers)
        self._loaded_order = [tuple(here.get(name, name) for name in names) for names in order]
        self._order = list(self._loaded_order)
        # DDP makes its final buckets after one backward, with static_graph after two.
        self._by_loaded = 2 if order else 0

    def _enter(self, name: str, parameter: torch.Tensor) -> None:
        why = "its gradient is sparse" if id(parameter) in self._sparse else ""
        self.reducer.add(clean(name), parameter, exact=why)

    def unused(self) -> Set[str]:
        """See `Adapter`. Where this rank had no backward, it looks now."""
        # A joined rank had no backward, and the others have shared their map of used parameters by
        # now. Inside a backward the reducer already holds the lock that this would take.
        if self.reducer.step.joined and torch._C._current_graph_task_id() == -1:
            self._look_for_unused()
        return self.reducer.step.unused

    def _looks_for_unused(self) -> DistributedDataParallel | None:
        """The model, if it was wrapped with `find_unused_parameters`."""
        model = self._model()
        if model is None or model.static_graph or not model.find_unused_parameters:
            return None
        return model

    def _look_for_unused(self) -> None:
        """Record the parameters that no rank has used: DDP leaves their gradients as they are."""
        model = self._looks_for_unused()
        if model is None:
            return
        used = model.reducer._get_local_used_map()  # summed over all ranks
        if used.numel() != len(self._reduced):  # some were frozen after the model was wrapped
            return
        unused = {name for name, n in zip(self._reduced, used.tolist(), strict=True) if not n}
        # A gradient is its part of the bucket, unless it is None; a rank in Join has old ones.
        if model.gradient_as_bucket_view and not self.reducer.step.joined:
            by_name = self.reducer.by_name
            unused = {name for name in unused if by_name[name].grad is None}
        self.reducer.step.unused = unused

    def rebuilds(self) -> bool:
        """See `Adapter`."""
        model = self._model()
        if model is None or model._has_rebuilt_buckets:
            return False
        return bool(model.static_graph or not model.find_unused_parameters)

    def _new_name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter that was frozen when compressed, but not when wrapped."""
        model = self._model()
        for name, known in model.module.named_parameters() if model is not None else ():
            if known is parameter:
                return str(name)
        raise Error(
            f"rank {self.reducer.process_group.rank()}: a gradient of shape "
            f"{tuple(parameter.shape)} belongs to no parameter of this state's model"
        )


def _settle_joined(model: DistributedDataParallel, *_: Any) -> None:
    """Settle the last step in which Join shadowed this rank, before the rank's own backward."""
    for _hook, state in model._comm_hooks:
        if isinstance(state, CompressionState) and state.reducer.step.joined:
            state.settle()


def _sparse(module: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose gradients DDP expects to be sparse."""
    return {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }


def compress_hook(state: CompressionState, bucket: GradBucket) -> Future:
    """Average a bucket's gradients over all ranks, compressed.

    The owner of each value sums the decoded values in float32 in rank order and divides once, so
    all ranks get the same bits. With the codec "fp32" the result is the exact average; DDP itself
    divides before it sums, which for two ranks gives the same bits.

    Args:
        state: codec and feedback; the same on all ranks.
        bucket: float32, or 16-bit floats, which are summed in float32 and rounded once. Other
            dtypes and sparse gradients are averaged exactly.

    Returns:
        A future of the bucket's tensor.

    Raises:
        Error: the group's all_reduce failed.
    """
    reduce = state.adapter.reduce_bucket
    if state.transform is not None:
        reduce = _reduce_in_order_of_indices
    future = reduce(state, bucket)
    if not future.done() and (ours := backend.find(state.process_group)) is not None:
        ours.wait_after_backward(future)  # so that signals end the wait of DDP, after this backward
    return future


def _reduce_in_order_of_indices(state: CompressionState, bucket: GradBucket) -> Future:
    """Average a bucket in which all gradients have the order of their indices meanwhile.

    Matrices have the rows and columns of the parameter's indices, also if a channels_last model has
    another order in memory: so have second moments and residuals, which are saved.
    """
    parameters = bucket.parameters()
    for parameter in parameters:  # in most models there is none
        if not parameter.is_contiguous() and _is_strided(parameter):
            break
    else:
        return state.adapter.reduce_bucket(state, bucket)
    strided = [
        (gradient, gradient.as_strided(parameter.shape, parameter.stride()))
        for gradient, parameter in zip(bucket.gradients(), parameters, strict=True)
        if _is_strided(parameter)
    ]
    for gradient, as_it_lies in strided:
        gradient.copy_(as_it_lies.clone())
    future = state.adapter.reduce_bucket(state, bucket)

    def restore(done: Future) -> torch.Tensor:
        result = done.value()
        for gradient, as_it_lies in strided:
            as_it_lies.copy_(gradient.clone())
        return result

    return future.then(restore)


def _is_strided(parameter: torch.Tensor) -> bool:
    """Return whether DDP's buckets have a parameter's gradient in another order than its indices.

    They have the order of its memory if that is without gaps. `GradBucket.gradients()` shows it as
    if it were that of the indices.
    """
    if parameter.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != extent:
            return False
        extent *= size
    return True
