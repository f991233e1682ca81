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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Cut
from pycomm.hooks.fsdp_seams import Unit, leave_replicas_to_the_hook, units
from pycomm.log import logger
from pycomm.policy import CODED, Decision, Policy, agree_on_options
from pycomm.policy.exchange import gather
from pycomm.reduction.factors import Matrix
from pycomm.reduction.state import CompressionState
from pycomm.reduction.taken import DiscardedGradients

# torch 2.13 renamed it, and warns about the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_KNOWN = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


class FSDPState(CompressionState):
    """Codecs and feedback of a model's shards.

    The constructor replaces the communication of the model, which uses this state from then on.

    Args:
        codec: codec of the gradients; see `CompressionState`. Rules see whole parameters, not
            shards.
        model: a model in which fully_shard or replicate has wrapped modules.
        options: feedback and seed; see `CompressionState`.

    Raises:
        Error: parts of the model are reduced in different groups, or are compressed already.
        ValueError: a codec whose payloads cannot be reduce-scattered.
        WireMismatch: ranks have different models or codecs.
    """

    def __init__(self, codec: str | Codec | Policy, model: nn.Module, **options: Any) -> None:
        self._units = list(units(model))
        info = _mesh_info(self._units)
        self._scatters = not isinstance(info, DDPMeshInfo)
        group = info.shard_process_group if self._scatters else info.replicate_process_group
        super().__init__(codec, process_group=group, **options)
        self.stays_because = (
            "its ranks share the parameters (fully_shard), whose shards keep their places: shard "
            "the model anew and go on from a checkpoint, with load_checkpoint"
        )
        self._ranks = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        self.shard_group = info.shard_process_group if self._ranks > 1 else None
        """The ranks that share the parameters; None: each has whole ones."""
        self._shards: dict[str, torch.Size] = {}  # by name: a rank's padded shard
        self._rows: set[str] = set()  # parameters that are sharded along their first dimension
        self._backward: int | None = None  # number of the running backward
        self._reduced: set[str] = set()  # in this step
        self._waits: list[Callable[[], object]] = []  # for collectives that are in flight
        # The device of the groups; parameters may be on the CPU, or have no memory yet.
        self._mesh_device = torch.device(info.mesh.device_type)
        if self.transform is None or self.transform.by_nodes:
            self.find_nodes(self._mesh_device)
        self._tensor_of: dict[str, Callable[[], torch.Tensor]] = {}
        for unit in self._units:
            for name, parameter in unit.parameters.items():
                if name in self._shards:
                    raise Error(f"the model has two parameters of the name {name}: rename one")
                self._shards[name] = parameter.padded_sharded_param_size
                if parameter.fsdp_placement.dim == 0:
                    self._rows.add(name)
                self._tensor_of[name] = partial(getattr, parameter, "sharded_param")
            self._enter(unit.trained())
        self.plan.complete()
        self.agree()
        if self.shard_group is not None and not self._scatters:
            # So far only the replicas of each shard have compared what they were given.
            terms = [f"gradients: {term}" for term in self.plan.terms]
            agree_on_options(terms, self.shard_group, self.process_group)
        if self.residuals:
            self._taken = DiscardedGradients(self._names, self._by_name, early=True)
        for unit in self._units:
            self._install(unit)

    def _refusal(self, codec: Codec) -> str:
        if self._scatters and codec.combine == "factors":
            return (
                f"{codec.name} averages whole matrices, and FSDP2 has shards of them at different "
                "ranks: take another codec, or HSDP, where it works on shards"
            )
        return super()._refusal(codec)

    def _install(self, unit: Unit) -> None:
        if self._scatters:
            unit.module.set_custom_reduce_scatter(CompressedReduceScatter(self, unit))
        else:
            leave_replicas_to_the_hook(unit.group)
            unit.module.set_all_reduce_hook(ReplicaHook(self, unit))

    # ------------------------------------------------------------------ steps

    def _enter(self, names: Sequence[str]) -> None:
        """Let codecs be decided for parameters that get gradients, frozen ones when they do."""
        for name in names:
            if name not in self._numbers:
                self.add(name, self._tensor_of[name]())
        self._device = self._mesh_device

    def begin_step(self, *, absent: bool = False) -> None:
        """See `CompressionState`. Loading a model may have replaced its parameters' tensors."""
        for name, before in list(self._by_name.items()):
            now = self._tensor_of[name]()
            if now is not before:
                self._put(name, now)
                if self._taken:
                    self._taken.replaced(name)
        super().begin_step(absent=absent)

    def enter(self, names: Sequence[str]) -> None:
        """Begin a step if these are the first parameters of a backward, or recur in it."""
        self._enter(names)
        backward = torch._C._current_graph_task_id()
        if backward == self._backward and self._reduced.isdisjoint(names):
            self._reduced.update(names)
            return
        if backward == self._backward:
            self.end_step()
        else:
            # Runs at the end of this backward, like torch's own hooks.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._backward, self._reduced = backward, set(names)
        self._waits.clear()
        self.begin_step()

    def _end_backward(self) -> None:
        self.end_step()
        self._backward = None

    def on_any_rank(self, found: bool) -> bool:
        """See `CompressionState`: with HSDP shards decide together, too."""
        found = super().on_any_rank(found)
        if self._scatters or self.shard_group is None:
            return found
        return any(one for (one,) in gather([found], self.shard_group, self._device))

    def end_step(self) -> None:
        """Wait for the step's collectives; with HSDP the shards agree whether it is finite."""
        super().end_step()
        for wait in self._waits:
            wait()
        self._waits.clear()
        if self._scatters or self.shard_group is None:
            return
        finite = self._all_finite()
        verdict = torch.tensor(finite, dtype=torch.uint8, device=self._device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self.shard_group)
        # Neither 0 nor the bytes of a failure.
        self._current.checks = [lambda: int(verdict) == 1]

    # ------------------------------------------------------------------ exchanges

    def expects(self, names: Sequence[str]) -> int:
        """Return the number of values in one rank's shards of these parameters, with padding."""
        return sum(self._shards[name].numel() for name in names)

    def travel_exactly(self, names: Sequence[str], why: str) -> None:
        """Note why gradients travel exactly in this step."""
        if self.transform is not None:
            self.transform.check_exact(names, why)
        self.plan.exactly.update(dict.fromkeys(names, why))

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
        later: bool = False,
    ) -> None:
        """Sum or average the gradients of all ranks, compressed; each rank gets its shards.

        Args:
            output: floats of 16 or 32 bits [values]; this rank's shards of the named parameters.
            input: the shards of every rank [ranks * values].
            names: the parameters, in the order of the input.
            group: the ranks that reduce.
            average: divide by the number of ranks.
            later: the result is not needed before backward ends.
        """
        self.enter(names)
        reducer = self.transform or self
        wait = reducer.scatter(output, input, names, group, average=average)
        if later:
            self._waits.append(wait)
        else:
            wait()

    def all_reduce(
        self, tensor: torch.Tensor, names: Sequence[str], *, later: bool = False
    ) -> None:
        """Average shards over the replicas, in place; `later`: see `reduce_scatter`."""
        self.enter(names)
        future = (self.transform or self).reduce(tensor, names)
        if later:
            self._waits.append(partial(self.wait, future))
        else:
            self._exchanges.finish()
            self.wait(future)

    def _cuts(self) -> dict[str, Cut]:
        if not self._scatters:
            return {}
        shapes = {name: self._tensor_of[name]().shape for name in self._rows}
        return {name: Cut(tuple(shape), self._ranks) for name, shape in shapes.items()}

    def _shape(self, name: str) -> Matrix | None:
        """See `BucketReducer`; of parameters that are sharded by rows."""
        found = super()._shape(name)
        if found is None or self._ranks == 1:
            return found
        if name not in self._rows:
            return None
        if self._scatters or self.shard_group is None:
            return found
        count = found.got.stop  # replicas average this rank's shard
        first = self.shard_group.rank() * count
        here = slice(first, first + count)
        return replace(found, given=here, got=here)

    @property
    def _all_groups(self) -> list[dist.ProcessGroup]:
        groups = [self.process_group]
        if self.shard_group is not None and not self._scatters:
            groups.append(self.shard_group)
        return groups

    @property
    def rows(self) -> int:
        """A reduce-scatter has a row for every owner; an all-reduce between replicas has one."""
        return self._ranks if self._scatters else 1

    def part(self, decision: Decision) -> Decision:
        """Return the decision for one rank's shard of a parameter, padded."""
        shape = tuple(self._shards[decision.parameter.name])
        parameter = replace(decision.parameter, shape=shape)
        return replace(decision, parameter=parameter, codec=decision.codec.fit(shape))


class Comm:
    """Base of the classes that replace torch's collectives of a unit."""

    def __init__(self, state: FSDPState, unit: Unit) -> None:
        self.state = state
        self._unit = unit
        self._told = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _reducible(self, tensor: torch.Tensor, numel: int) -> bool:
        """Return whether all parameters have gradients; logs once if they do not."""
        names, exactly = self._unit.trained(), self.state.plan.exactly
        if tensor.dtype not in CODED:
            what = str(tensor.dtype).removeprefix("torch.")
            self.state.travel_exactly(names, f"no codec takes {what}")
            return False
        if numel != self.state.expects(names):
            self.state.travel_exactly(names, "some of its unit have no gradients")
            if not self._told:
                logger.warning(
                    "fsdp: some of %s have no gradient in this step, and it is not known which: "
                    "the others travel exactly. set_reduce_scatter_unused_params(True) on their "
                    "module makes them zero, and then all are compressed",
                    ", ".join(names),
                )
                self._told = True
            return False
        for name in names if exactly else ():
            exactly.pop(name, None)
        return True


class CompressedReduceScatter(Comm, ReduceScatter):
    """Compressed reduce-scatter for `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce; the result is ready when this returns, or when backward ends."""
        # Not `op in _KNOWN`: an operation with a factor equals its kind, but its kind does not
        # equal the operation.
        known = any(op == kind for kind in _KNOWN)
        if not known or not self._reducible(input_tensor, output_tensor.numel()):
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return None
        if op == dist.ReduceOp.PREMUL_SUM:  # each rank has a factor of its own
            _, factor = op.__getstate__()
            input_tensor = input_tensor * factor
        self.state.reduce_scatter(
            output_tensor,
            input_tensor,
            self._unit.trained(),
            group,
            average=op == dist.ReduceOp.AVG,
            later=self._unit.only_views(output_tensor),
        )
        return None


class ReplicaHook(Comm):
    """Average over the replicas, for `FSDPModule.set_all_reduce_hook`."""

    def __init__(self, state: FSDPState, unit: Unit) -> None:
        super().__init__(state, unit)
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
        if self._reducible(reduce_output, reduce_output.numel()):
            later = self._unit.only_views(reduce_output)
            self.state.all_reduce(reduce_output, self._unit.trained(), later=later)
        else:
            dist.all_reduce(reduce_output, group=self.state.process_group)
            reduce_output.div_(self.state.process_group.size())
        if group.gradient_divide_factor is not None:  # then torch sums instead of averaging
            reduce_output.mul_(self.state.process_group.size())

    def _keep(self, reduce_output: torch.Tensor) -> None:
        if self._partial is None:
            self._partial = reduce_output.clone()
        else:
            self._partial.add_(reduce_output)
        reduce_output.zero_()


def _mesh_info(found: Sequence[Unit]) -> Any:
    """The mesh that all wrapped parts of the model share."""
    infos = [unit.group.mesh_info for unit in found]
    if any(info != infos[0] for info in infos):
        raise Error(
            "parts of this model are reduced in different groups of ranks: compress each part by "
            "itself, pycomm.compress(part, ...), before anything else has run"
        )
    if _state_of(found) is not None:
        raise Error(
            "this model, or a part of it, is compressed already: change its codec by "
            "set_policy() of that state"
        )
    return infos[0]


def compressed_state(model: nn.Module) -> FSDPState | None:
    """Return the state that compresses a model in fully_shard, if there is one."""
    return _state_of(units(model))


def _state_of(found: Iterable[Unit]) -> FSDPState | None:
    for unit in found:
        for comm in (unit.group._reduce_scatter_comm, unit.group._all_reduce_hook):
            if isinstance(comm, Comm):
                return comm.state
    return None
