"""Communication of FSDP2 (`torch.distributed.fsdp.fully_shard`), compressed.

What crosses the slow link decides what is compressed:

* FSDP: gradients are reduce-scattered. Each rank encodes, with feedback, the shard of every
  parameter for its owner, which decodes, adds and keeps float32: one coding, nothing is sent back.
* HSDP: inside a replica the reduce-scatter stays exact, since that is where links are fast; the
  all-reduce of the shards between replicas is compressed, with feedback, as a bucket of DDP's is.
* `replicate()`: the all-reduce between replicas, of whole parameters.
* Weights are all-gathered exactly unless a codec for them is named: no feedback corrects them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
)

from pycomm import backend
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks import two_shot
from pycomm.hooks.bucket import Bucket
from pycomm.hooks.state import CODED, CompressionState
from pycomm.policy import Decision, Policy
from pycomm.policy import agree as agree_on

logger = logging.getLogger("pycomm")

# torch 2.13 renamed them, and warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # which names of parameters do not show


@dataclass(frozen=True, eq=False)
class Unit:
    """What one fully_shard call has made: parameters that travel together."""

    module: FSDPModule
    group: Any
    """torch's FSDPParamGroup."""
    parameters: dict[str, Any]
    """torch's FSDPParam by name, in the order in which they lie in what is sent."""

    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that get gradients."""
        return tuple(n for n, p in self.parameters.items() if p.sharded_param.requires_grad)


def units(model: nn.Module) -> Iterator[Unit]:
    """Find the parts of a model that fully_shard has wrapped, each once."""
    names = {id(module): name for name, module in model.named_modules()}
    seen = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) in seen:
                continue
            seen.add(id(group))
            parameters = {}
            for parameter in group.fsdp_params:
                info = parameter._module_info
                name = ".".join(filter(None, (names[id(info.module)], info.param_name)))
                for wrapper in WRAPPERS:
                    name = name.replace(wrapper, "")
                parameters[name] = parameter
            yield Unit(module, group, parameters)


class FSDPState(CompressionState):
    """Codecs and feedback of a model's shards; and the model's communication uses it from now on.

    Args:
        codec: of gradients, as `CompressionState` has it. Rules see whole parameters, not shards.
        model: a model in which fully_shard or replicate has wrapped modules.
        weights: codec or policy of the parameters when they are gathered; None: exactly.
        options: feedback and seed, as `CompressionState` has them.

    Raises:
        Error: parts of the model are reduced in different groups, or are compressed already.
        ValueError: a codec whose payloads cannot be reduce-scattered.
        WireMismatch: ranks have different models or codecs.
    """

    def __init__(
        self,
        codec: str | Codec | Policy,
        model: nn.Module,
        *,
        weights: str | Codec | Policy | None = None,
        **options: Any,
    ) -> None:
        self._units = list(units(model))
        info = _mesh_info(self._units)
        self._scatters = not isinstance(info, DDPMeshInfo)
        group = info.shard_process_group if self._scatters else info.replicate_process_group
        super().__init__(codec, process_group=group, **options)
        self._ranks = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        self._shard_group = info.shard_process_group if self._ranks > 1 else None
        self._shards: dict[str, torch.Size] = {}  # by name: what a rank has of it, with padding
        self._in_backward = False
        self._reduced: set[str] = set()  # in this step
        for unit in self._units:
            for name, parameter in unit.parameters.items():
                if name in self._shards:
                    raise Error(f"the model has two parameters of the name {name}")
                self.add(name, parameter.sharded_param)
                self._shards[name] = parameter.padded_sharded_param_size
        self._refuse_factors()
        self.agree()
        self.weights: dict[str, Decision] = {}
        """The codec of each parameter's weights, by name; none: exactly."""
        self._weight_buckets: dict[tuple[str, ...], Bucket] = {}
        if weights is not None:
            policy = Policy.of(weights)
            self.weights = {n: policy.decide(d.parameter) for n, d in self.decisions.items()}
            agree_on(list(self.weights.values()), self.process_group, self._device)
        for unit in self._units:
            self._install(unit)

    def _refuse_factors(self) -> None:
        for decision in self.decisions.values():
            if self._scatters and decision.codec.combine == "factors":
                raise ValueError(
                    f"{decision.codec.name} averages whole matrices, and FSDP2 has shards of them "
                    "at different ranks: take another codec, or HSDP, where it works on shards"
                )

    def _install(self, unit: Unit) -> None:
        if self._scatters:
            unit.module.set_custom_reduce_scatter(CompressedReduceScatter(self, unit))
        else:
            _leave_replicas_to_the_hook(unit.group)
            unit.module.set_all_reduce_hook(ReplicaHook(self, unit))
        if self.weights and self._ranks > 1:
            unit.module.set_custom_all_gather(CompressedAllGather(self, unit))

    # ------------------------------------------------------------------ steps

    def enter(self, names: Sequence[str]) -> None:
        """Begin a step if these parameters are the first of a backward, or come once more in it."""
        if self._in_backward and self._reduced.isdisjoint(names):
            self._reduced.update(names)
            return
        if self._in_backward:
            self.end_step()
        else:
            # Runs when all of this backward has run, as torch's own hooks do it.
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)
        self._in_backward = True
        self._reduced = set(names)
        self.begin_step()

    def _leave(self) -> None:
        self.end_step()
        self._in_backward = False

    def end_step(self) -> None:
        """Tell that all of this step has been reduced; with HSDP the shards agree on a verdict."""
        super().end_step()
        if self._scatters or self._shard_group is None:
            return
        finite = all([check() for check in self._finite])
        verdict = torch.tensor(finite, dtype=torch.uint8, device=self._device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self._shard_group)
        self._finite = [lambda: bool(verdict)]

    # ------------------------------------------------------------------ exchanges

    def expects(self, names: Sequence[str]) -> int:
        """Return how many values one rank has of the named parameters, with padding."""
        return sum(self._shards[name].numel() for name in names)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> None:
        """Sum or average what ranks have for each other.

        Args:
            output: floats of 16 or 32 bits [values]; what this rank has of the named parameters.
            input: the same for every rank [ranks * values].
            names: as they lie in it.
            group: where to reduce.
            average: divide by the number of ranks.
        """
        self.enter(names)
        bucket = self._bucket(tuple(names), input.device)
        self._use(bucket.pieces, bucket, input)
        native = backend.find(group) if input.is_cpu else None
        if native is not None:
            work = native.compressed_reduce_scatter(
                output, input, bucket.native, bucket.sides, self.seed, self.step, average
            )
            work.wait()
            self._finite.append(lambda: work.finite)
            return
        result = output if output.dtype == torch.float32 else output.float()
        finite = two_shot.reduce_scatter(
            result,
            input.float(),
            bucket,
            group,
            seed=self.seed,
            step=self.step,
            average=average,
        )
        self._finite.append(lambda: bool(finite))
        if result is not output:
            output.copy_(result)

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
    ) -> dist.Work | None:
        """Gather weights, encoded; the work is None if that is done.

        Args:
            output: floats of 16 or 32 bits [ranks * values].
            input: of the same type [values]: what this rank has of the named parameters.
            names: as they lie in it.
            group: where to gather.
        """
        key = tuple(names)
        bucket = self._weight_buckets.get(key)
        if bucket is None:
            decisions = [self.part(self.weights[name]) for name in key]
            numbers = [self._numbers[name] for name in key]
            bucket = self._weight_buckets[key] = Bucket(decisions, numbers, None, input.device)
        native = backend.find(group) if input.is_cpu else None
        if native is not None:
            work: dist.Work = native.compressed_all_gather(
                output, input, bucket.native, bucket.sides, self.seed, self.step
            )
            return work
        result = output if output.dtype == torch.float32 else output.float()
        two_shot.all_gather(result, input.float(), bucket, group, seed=self.seed, step=self.step)
        if result is not output:
            output.copy_(result)
        return None

    def all_reduce(self, tensor: torch.Tensor, names: Sequence[str]) -> None:
        """Average shards over the replicas, in place."""
        self.enter(names)
        future = self.reduce(tensor, names)
        self._exchanges.finish()
        future.wait()

    @property
    def rows(self) -> int:
        """A rank has a part of each parameter for every owner, or one for its other replicas."""
        return self._ranks if self._scatters else 1

    def part(self, decision: Decision) -> Decision:
        """Return the decision for one rank's shard of a parameter, padded."""
        shape = tuple(self._shards[decision.parameter.name])
        parameter = replace(decision.parameter, shape=shape)
        return replace(decision, parameter=parameter, codec=decision.codec.fit(shape))


def _mesh_info(found: Sequence[Unit]) -> Any:
    """The mesh that all parts of the model share."""
    infos = [unit.group.mesh_info for unit in found]
    if any(info != infos[0] for info in infos):
        raise Error(
            "parts of this model are reduced in different groups of ranks: compress each part by "
            "itself, pycomm.compress(part, ...), before anything else has run"
        )
    for unit in found:
        comms = (unit.group._reduce_scatter_comm, unit.group._all_reduce_hook)
        if any(isinstance(comm, (CompressedReduceScatter, ReplicaHook)) for comm in comms):
            raise Error("this model, or a part of it, is compressed already")
    return infos[0]


def _leave_replicas_to_the_hook(group: Any) -> None:
    """Let torch reduce inside a replica only.

    For HSDP torch calls the all-reduce between replicas itself, before the hook, and lets nobody
    take its place. Without a replicating dimension in the group's mesh it calls the hook alone. The
    parameters keep theirs, from which their placements follow.
    """
    old = group.mesh_info
    kind = FSDPMeshInfo if isinstance(old, FSDPMeshInfo) else DataParallelMeshInfo
    new = kind(**{field.name: getattr(old, field.name) for field in fields(kind) if field.init})
    if separate := getattr(old, "reduce_scatter_process_group", None):
        vars(new)["reduce_scatter_process_group"] = separate
    if group.post_forward_mesh_info == old:
        group.post_forward_mesh_info = new
    group.mesh_info = new


class _Comm:
    """What the classes below have in common."""

    def __init__(self, state: FSDPState, unit: Unit) -> None:
        self._state = state
        self._unit = unit
        self._told = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for what is sent and received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _reducible(self, tensor: torch.Tensor, numel: int) -> bool:
        """Whether gradients are those of all parameters; tells once if they are not."""
        if tensor.dtype not in CODED:
            return False
        if numel != self._state.expects(self._unit.trained()):
            if not self._told:
                logger.warning(
                    "fsdp: some of %s have no gradient in this step, and it is not known which: "
                    "the others travel exactly. set_reduce_scatter_unused_params(True) on their "
                    "module makes them zero, and then all are compressed",
                    ", ".join(self._unit.trained()),
                )
                self._told = True
            return False
        return True


class CompressedReduceScatter(_Comm, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce; the result is there when this returns."""
        known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
        if not known or not self._reducible(input_tensor, output_tensor.numel()):
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return None
        self._state.reduce_scatter(
            output_tensor,
            input_tensor,
            self._unit.trained(),
            group,
            average=op == dist.ReduceOp.AVG,
        )
        if op == dist.ReduceOp.PREMUL_SUM:
            _, factor = op.__getstate__()
            output_tensor.mul_(factor)
        return None


class CompressedAllGather(_Comm, AllGather):
    """For `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; shards of another kind, such as those of fewer ranks after forward, exactly."""
        names = tuple(self._unit.parameters)
        if input_tensor.dtype in CODED and input_tensor.numel() == self._state.expects(names):
            work = self._state.all_gather(output_tensor, input_tensor, names, group)
        else:
            work = _all_gather(output_tensor, input_tensor, group=group, async_op=True)
        if work is None or async_op:
            return work
        work.wait()
        return None


class ReplicaHook(_Comm):
    """For `FSDPModule.set_all_reduce_hook`: averages over the replicas."""

    def __init__(self, state: FSDPState, unit: Unit) -> None:
        super().__init__(state, unit)
        self._partial: torch.Tensor | None = None  # of micro-steps that are not to be reduced

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
            self._state.all_reduce(reduce_output, self._unit.trained())
        else:
            dist.all_reduce(reduce_output, group=self._state.process_group)
            reduce_output.div_(self._state.process_group.size())
        if group.gradient_divide_factor is not None:  # torch adds up then
            reduce_output.mul_(self._state.process_group.size())

    def _keep(self, reduce_output: torch.Tensor) -> None:
        if self._partial is None:
            self._partial = reduce_output.clone()
        else:
            self._partial.add_(reduce_output)
        reduce_output.zero_()
