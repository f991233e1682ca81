"""Compressed communication of FSDP2 (`torch.distributed.fsdp.fully_shard`).

The collective that crosses the slow link is compressed:

* FSDP: gradients are reduce-scattered. Each rank encodes every parameter's shards, with feedback,
  for their owners, which decode, sum and keep float32: one coding, nothing is sent back.
* HSDP: the reduce-scatter inside a replica stays exact, since links are fast there. The all-reduce
  of the shards between replicas is compressed, with feedback, like a DDP bucket.
* `replicate()`: the all-reduce of whole parameters between replicas is compressed.
* Weights are all-gathered by torch: no feedback could correct what a codec loses of them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks.fsdp_seams import (
    Unit,
    after_finalizing,
    is_in_backward,
    leave_replicas_to_the_hook,
    units,
)
from pycomm.log import warn_once
from pycomm.policy import CODED, Policy
from pycomm.reduction.adapter import Adapter, Layout
from pycomm.reduction.refusals import FSDP, HSDP, MOMENTA, refused
from pycomm.reduction.state import CompressionState
from pycomm.reduction.taken import DiscardedGradients

# torch 2.13 renamed it, and warns about the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_KNOWN = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


def _outside() -> None:
    """Stands for the end of a step that is in no backward, as those of pipelines."""


def compress_shards(
    codec: str | Codec | Policy, model: nn.Module, **options: Any
) -> CompressionState:
    """Replace the communication of a model, and return the state that it uses from then on.

    Args:
        codec, options: as for `CompressionState`. Rules see whole parameters, not shards.
        model: a model in which fully_shard or replicate has wrapped modules.

    Raises:
        Error: parts of the model are reduced in different groups, or are compressed already.
        WireMismatch: ranks have different models or codecs.
    """
    found = list(units(model))
    info = _mesh_info(found)
    scatters = not isinstance(info, DDPMeshInfo)
    group = info.shard_process_group if scatters else info.replicate_process_group
    shares = isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1
    parameters = [item for unit in found for item in unit.parameters.items()]
    for name, count in Counter(name for name, _ in parameters).items():
        if count > 1:
            raise Error(f"the model has two parameters of the name {name}: rename one")
    layout = Layout(
        shards={name: parameter.padded_sharded_param_size for name, parameter in parameters},
        by_rows={name for name, parameter in parameters if parameter.fsdp_placement.dim == 0},
        shard_group=info.shard_process_group if shares else None,
        scatters=scatters,
        device=torch.device(info.mesh.device_type),  # parameters may be elsewhere, or nowhere yet
    )
    adapter = Adapter(FSDP if scatters else HSDP, layout, early=True)
    state = CompressionState(codec, process_group=group, adapter=adapter, **options)
    hooks = FSDPHooks(state, found)
    state.agree()
    if state.residuals:
        reducer = state.reducer
        state.discarded = DiscardedGradients(reducer.names, reducer.by_name, early=True)
    for unit in found:
        after_finalizing(unit.group, hooks.finalized)
        if scatters and group.size() > 1:
            unit.module.set_custom_reduce_scatter(CompressedReduceScatter(hooks, unit))
        else:  # one rank has nothing to scatter, but may have feedback or coded momenta
            if not scatters:
                leave_replicas_to_the_hook(unit.group)
            unit.module.set_all_reduce_hook(ReplicaHook(hooks, unit))
    return state


class FSDPHooks:
    """What the collectives of a model in FSDP2 do for its state.

    Args:
        state: the state.
        units: the wrapped parts of the model, whose parameters are entered.
    """

    def __init__(self, state: CompressionState, units: Sequence[Unit]) -> None:
        self.state, self._reducer = state, state.reducer
        if state.transform is None:
            self._reducer.find_nodes(self._reducer.device)
        self._units = units
        # What ends the step of now, while its backward lasts: one that an error ends drops it.
        self._end: Callable[[], object] = _outside
        # torch's FSDPParam by name, whose tensors may be replaced by others.
        self._parameters = {n: p for unit in units for n, p in unit.parameters.items()}
        for unit in units:
            self._enter(unit.trained())

    # ------------------------------------------------------------------ steps

    def _enter(self, names: Sequence[str]) -> None:
        """Let codecs be decided for parameters that get gradients, frozen ones when they do."""
        for name in names:
            if name not in self._reducer.numbers:
                self._reducer.add(name, self._parameters[name].sharded_param)

    def _begin_step(self) -> None:
        """Begin a step. Loading a model may have replaced its parameters' tensors."""
        for name, before in list(self._reducer.by_name.items()):
            now = self._parameters[name].sharded_param
            if now is not before:
                self._reducer.put(name, now)
                if self.state.discarded:
                    self.state.discarded.replaced(name)
        self.state.begin_step()

    def enter(self, names: Sequence[str]) -> None:
        """Begin a step if these are the first parameters of a backward, or recur in it.

        Backwards in this one, as reentrant checkpoints make them, belong to its step.
        """
        self._enter(names)
        inside = torch._C._current_graph_task_id() != -1
        ends = self._end() if inside else self._end is _outside
        if not self.state.is_open or not ends:
            self._end = weakref.ref(self._queue_end()) if inside else _outside
            self._begin_step()
        elif not self._reducer.step.entered.isdisjoint(names):
            self.state.end_step()
            self._begin_step()
        self._reducer.step.entered.update(names)

    def _queue_end(self) -> Callable[[], None]:
        """Let the backward of now end the step, and drop what this returns when it is over."""
        # Behind torch's own callbacks: those of units whose inputs need no gradient reduce them.
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def end() -> None:
            if is_in_backward(self._units):  # it has begun in a backward within that one
                self._end = self._in_outer_backward
            else:
                queue(self.state.end_step)

        queue(end)
        return end

    def _in_outer_backward(self) -> bool:
        """Stands for the end of a step that has begun in a backward within another one."""
        return is_in_backward(self._units)

    def finalized(self) -> None:
        """End a step whose end no backward of its own brings: torch has reduced its gradients."""
        if not self.state.is_open:
            return
        if self._end is _outside:
            self.state.end_step()
        elif self._end == self._in_outer_backward:  # units that follow may still reduce theirs
            self._end = weakref.ref(self._queue_end())


class Comm:
    """Base of the classes that replace torch's collectives of a unit."""

    def __init__(self, hooks: FSDPHooks, unit: Unit) -> None:
        self.hooks, self.reducer = hooks, hooks.state.reducer
        self._unit = unit

    def _reducible(self, tensor: torch.Tensor, numel: int) -> bool:
        """Return whether all parameters have gradients; logs once if they do not."""
        names, plan = self._unit.trained(), self.reducer.plan
        why = ""
        if tensor.dtype not in CODED:
            why = f"no codec takes {str(tensor.dtype).removeprefix('torch.')}"
        elif numel != sum(self.reducer.layout.shards[name].numel() for name in names):
            why = "some of its unit have no gradients"
            warn_once(
                f"fsdp: some of {', '.join(names)} have no gradient in a step, and it is not known "
                "which: the others travel exactly. set_reduce_scatter_unused_params(True) on their "
                "module makes them zero, and then all are compressed"
            )
        if why:
            if self.reducer.transform is not None:
                self.reducer.transform.check_exact(names, why)
            plan.exactly.update(dict.fromkeys(names, why))
            return False
        for name in names if plan.exactly else ():
            plan.exactly.pop(name, None)
        return True


class CompressedReduceScatter(Comm, DefaultAllocMixin, ReduceScatter):
    """Compressed reduce-scatter for `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce; the result is ready when this returns."""
        # Not `op in _KNOWN`: an operation with a factor equals its kind, but its kind does not
        # equal the operation.
        known = any(op == kind for kind in _KNOWN)
        if not known or not self._reducible(input_tensor, output_tensor.numel()):
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return None
        if op == dist.ReduceOp.PREMUL_SUM:  # each rank has a factor of its own
            _, factor = op.__getstate__()
            input_tensor = input_tensor * factor
        names, average = self._unit.trained(), op == dist.ReduceOp.AVG
        self.hooks.enter(names)
        reducer = self.reducer.transform or self.reducer
        reducer.scatter(output_tensor, input_tensor, names, group, average=average)
        return None


class ReplicaHook(Comm):
    """Average over the replicas, for `FSDPModule.set_all_reduce_hook`."""

    def __init__(self, hooks: FSDPHooks, unit: Unit) -> None:
        super().__init__(hooks, unit)
        self._partial: torch.Tensor | None = None  # sum of micro-steps that are not reduced yet

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Average the shards of a unit in place."""
        group = self._unit.group
        if not group.all_reduce_grads:
            self._keep(reduce_output)
            return
        if self._partial is not None:
            reduce_output.add_(self._partial)
            self._partial = None
        ranks = self.reducer.process_group.size()
        if self._reducible(reduce_output, reduce_output.numel()):
            names = self._unit.trained()
            self.hooks.enter(names)
            self.reducer.wait((self.reducer.transform or self.reducer).reduce(reduce_output, names))
        else:
            dist.all_reduce(reduce_output, group=self.reducer.process_group)
            reduce_output.div_(ranks)
        if group.gradient_divide_factor is not None:  # then torch sums instead of averaging
            reduce_output.mul_(ranks)

    def _keep(self, reduce_output: torch.Tensor) -> None:
        if self._partial is None:
            self._partial = reduce_output.clone()
        else:
            self._partial.add_(reduce_output)
        reduce_output.zero_()


def check_averages(model: nn.Module, who: str) -> list[dist.ProcessGroup]:
    """Check that torch averages the gradients; return the groups of ranks, as of `Plan`.

    Args:
        model: the model.
        who: name of its optimizer.

    Raises:
        Error: torch divides the gradients by something else, or sums them.
        ValueError: a parameter is sharded by another dimension than the first.
    """
    groups: dict[dist.ProcessGroup, None] = {}
    for unit in units(model):
        group = unit.group
        if (
            group.gradient_divide_factor is not None
            or group.force_sum_reduction_for_comms
            or torch.float16 in unit.reduced_in()
        ):
            raise Error(refused(MOMENTA, "sums of torch"))
        for name, parameter in unit.parameters.items():
            if parameter.fsdp_placement.dim != 0 and parameter.sharded_param.ndim > 1:
                where = {"name": name, "dim": parameter.fsdp_placement.dim}
                raise ValueError(f"{who}: {refused(MOMENTA, 'shards that are not rows', **where)}")
        if isinstance(group.mesh_info, FSDPMeshInfo):
            groups[group.mesh_info.shard_process_group] = None
        if isinstance(group.mesh_info, DDPMeshInfo):
            groups[group.mesh_info.replicate_process_group] = None
    return list(groups)


def _mesh_info(found: Sequence[Unit]) -> Any:
    """The mesh that all wrapped parts of the model share."""
    infos = [unit.group.mesh_info for unit in found]
    if any(info != infos[0] for info in infos):
        raise Error(
            "parts of this model are reduced in different groups of ranks: compress each part by "
            "itself, pycomm.compress(part, ...), before anything else has run"
        )
    if state_of_units(found) is not None:
        raise Error(
            "this model, or a part of it, is compressed already: change its codec by "
            "set_policy() of that state"
        )
    return infos[0]


def state_of_units(found: Iterable[Unit]) -> CompressionState | None:
    """Return the state that compresses parts of a model in fully_shard, if there is one."""
    for unit in found:
        for comm in (unit.group._reduce_scatter_comm, unit.group._all_reduce_hook):
            if isinstance(comm, Comm):
                return comm.hooks.state
    return None
