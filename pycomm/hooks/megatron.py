"""Compressed gradients of Megatron-Core's DistributedDataParallel.

It keeps all gradients in flat buffers, of which each bucket is reduced by its bucket group:
`start_grad_sync` begins when the bucket's gradients are ready, `finish_grad_sync` waits for it.
Both are replaced (tested with megatron-core 0.16.1). A bucket travels as a compressed all-reduce,
also under the distributed optimizer, which then uses its shard of the result: a shard there begins
and ends in the middle of parameters, so the owner of a value is not the rank that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks.replaced import attach, is_a, refuse_second, replace
from pycomm.log import logger
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.refusals import MEGATRON, refused
from pycomm.reduction.state import CompressionState


def is_megatron(model: nn.Module) -> bool:
    """Return whether a module is Megatron-Core's DistributedDataParallel."""
    module = "megatron.core.distributed.distributed_data_parallel"
    return is_a(model, module, "DistributedDataParallel")


def compress_chunk(codec: str | Codec | Policy, model: Any, **options: Any) -> CompressionState:
    """Replace the reductions of one model chunk, and return the state that they use.

    Args:
        codec, options: as for `CompressionState`.
        model: Megatron-Core's DistributedDataParallel, with or without the distributed optimizer.

    Raises:
        Error: the model is compressed already.
        ValueError: the model has several instances of the distributed optimizer, which reduce in
            two stages.
    """
    refuse_second(model, "model")
    config = model.ddp_config
    if config.num_distributed_optimizer_instances > 1:
        option = "`num_distributed_optimizer_instances` above 1"
        count = config.num_distributed_optimizer_instances
        raise ValueError(refused(MEGATRON, option, count=count))
    group = model.intra_dp_cp_group
    state = CompressionState(codec, process_group=group, adapter=Adapter(MEGATRON), **options)
    names = {p: clean(name) for name, p in model.module.named_parameters()}
    buckets = [bucket for group in model.bucket_groups for bucket in group.buckets]
    held = {p for bucket in buckets for p in bucket.params_list}
    for parameter, name in names.items():
        if parameter in held:
            same = parameter.dtype == parameter.main_grad.dtype
            state.add(name, parameter if same else parameter.main_grad)
    attach(state, model)
    experts = [p for group in model.expert_parallel_bucket_groups for p in group.params]
    if experts and state.process_group.rank() == 0:
        logger.warning(
            "megatron: %d parameters of experts, from %s on, are reduced in a group of their "
            "own: they travel exactly. Leave experts out of expert parallelism "
            "(expert_model_parallel_size=1) to compress them",
            len(experts),
            min(names[p] for p in experts),
        )
    groups: list[BucketGroup] = []
    groups += [BucketGroup(state, theirs, names, groups) for theirs in model.bucket_groups]
    return state


class BucketGroup:
    """One of Megatron's bucket groups, whose two methods are replaced.

    Args:
        state: codecs and feedback of the chunk's dense parameters.
        theirs: Megatron's object.
        names: of the parameters.
        groups: all groups of the chunk.
    """

    def __init__(
        self,
        state: CompressionState,
        theirs: Any,
        names: dict[Any, str],
        groups: Sequence[BucketGroup],
    ) -> None:
        self._state, self._theirs, self._names, self._groups = state, theirs, names, groups
        self._pending: list[Callable[[], None]] = []
        self._begun = False  # from start to finish
        replace(theirs, "start_grad_sync", self.start)
        replace(theirs, "finish_grad_sync", self.finish)

    @torch.no_grad()
    def start(self, force_all_reduce: bool | None = False) -> None:
        """Begin to reduce the group's buckets, in place of Megatron's method."""
        group, config = self._theirs, self._theirs.ddp_config
        if self._begun:
            if group.is_first_batch or not config.overlap_grad_reduce:
                return  # begun already, as Megatron's own method has it for the first batch
            raise Error("a bucket group's gradients are reduced twice before they are waited for")
        state = self._state
        if state.is_open and self in state.reducer.step.entered:
            state.end_step()  # this group reduces again before the others have begun
        if not state.is_open:
            state.begin_step()
        state.reducer.step.entered.add(self)
        self._begun = True
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            group.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad,
                check_for_large=config.check_for_large_grads,
            )
        ranks = state.process_group.size()
        for bucket in group.buckets:
            # Megatron multiplies before it sums, or averages; its factor is usually 1 / ranks.
            factor = bucket.gradient_scaling_factor
            factor *= 1 if config.average_in_collective else ranks
            self._pending.append(self._reduce(bucket, factor))

    def _reduce(self, bucket: Any, factor: float) -> Callable[[], None]:
        """Start to average gradients that travel together; return what waits, and multiplies."""
        state, data = self._state, bucket.grad_data
        views = [p.main_grad.view(-1) for p in bucket.params_list]
        sizes = [view.numel() for view in views]
        padded = sum(sizes) != data.numel()
        flat = torch.cat(views) if padded else data
        future = state.reduce(flat, [self._names[p] for p in bucket.params_list])

        def complete() -> None:
            state.wait(future)
            if padded:  # the distributed optimizer aligns parameters
                for view, part in zip(views, torch.split(flat, sizes), strict=True):
                    view.copy_(part)
            if factor != 1.0:
                data.mul_(factor)

        return complete

    def finish(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the group's gradients, in place of Megatron's method.

        All are waited for with the last group: those that begin here travel beside each other.
        """
        self._theirs.param_gather_dispatched = False
        if not self._begun:
            if self._theirs.ddp_config.overlap_grad_reduce and not self._theirs.is_first_batch:
                raise Error(
                    "Megatron has not begun to reduce a bucket group when it waits for it: some of "
                    "its parameters got no gradient in this backward. Freeze them "
                    "(requires_grad=False), or set overlap_grad_reduce=False"
                )
            self.start(force_all_reduce=force_all_reduce)
        self._begun = False
        state = self._state
        if state.is_open and len(state.reducer.step.entered) == len(self._groups):
            state.end_step()
        if not state.is_open:
            for each in self._groups:
                each.complete()

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for the gradients, and write them to their buffer."""
        for complete in self._pending:
            complete()
        self._pending.clear()
