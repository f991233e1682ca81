"""Hooks into torch's FSDP2: the units of a wrapped model, and classes that replace its collectives.

`pycomm.hooks.fsdp` implements the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

from pycomm.errors import Error
from pycomm.log import logger
from pycomm.policy import CODED, Plan
from pycomm.policy.names import clean

# torch 2.13 renamed them, and warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_KNOWN = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)

# The attributes of FSDPParamGroup that compression replaces.
_SEAMS = (
    *("_reduce_scatter_comm", "_all_gather_comm", "_all_reduce_hook"),
    *("mesh_info", "post_forward_mesh_info"),
)

# All other parts of torch's FSDPParamGroup and FSDPParam that compression reads, which are private:
# torch 2.11 to 2.15 have them.
_OF_GROUP = (
    "fsdp_params",
    "all_reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
)
_OF_PARAMETER = ("_module_info", "sharded_param")


class UnitReducer(Protocol):
    """The interface of the state, which `pycomm.hooks.fsdp.FSDPState` implements and documents."""

    process_group: dist.ProcessGroup
    plan: Plan

    def expects(self, names: Sequence[str]) -> int: ...
    def travel_exactly(self, names: Sequence[str], why: str) -> None: ...
    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
        later: bool = False,
    ) -> None: ...
    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
    ) -> dist.Work | None: ...
    def all_reduce(
        self, tensor: torch.Tensor, names: Sequence[str], *, later: bool = False
    ) -> None: ...


@dataclass(frozen=True, eq=False)
class Unit:
    """One fully_shard call's parameters, which travel together."""

    module: FSDPModule
    group: Any
    """torch's FSDPParamGroup."""
    parameters: dict[str, Any]
    """torch's FSDPParam by name, in the order of the message."""

    def __post_init__(self) -> None:
        kept = {name: getattr(self.group, name) for name in _SEAMS if hasattr(self.group, name)}
        object.__setattr__(self, "_before", kept)

    def restore(self) -> None:
        """Restore the communication that torch's group had when this object was made."""
        for name, value in vars(self)["_before"].items():
            setattr(self.group, name, value)

    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that get gradients."""
        return tuple(n for n, p in self.parameters.items() if p.sharded_param.requires_grad)

    def only_views(self, result: torch.Tensor) -> bool:
        """Return whether torch reads no result before backward ends, so that it may come later.

        torch stores views of the result as gradients, unless it has to convert it, divide it or add
        it to existing gradients, or user code waits for them.
        """
        trained = [self.parameters[name].sharded_param for name in self.trained()]
        return (
            result.is_cpu
            and result.dtype in (torch.float32, torch.bfloat16)
            and all(self._gradient_dtype(name) == result.dtype for name in self.trained())
            and self.group.gradient_divide_factor is None
            and not self.group.force_sum_reduction_for_comms
            and all(p.grad is None for p in trained)
            and not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained)
        )

    def reduced_in(self) -> set[torch.dtype | None]:
        """The dtypes that the policies of mixed precision ask for in reductions: since torch 2.15
        there is one for each parameter, before that one for the group."""
        holders = [self.group] if hasattr(self.group, "mp_policy") else self.parameters.values()
        for holder in holders:
            _check(holder, ("mp_policy",))
        return {getattr(holder.mp_policy, "reduce_dtype", None) for holder in holders}

    def _gradient_dtype(self, name: str) -> torch.dtype | None:
        """The dtype to which torch converts a parameter's reduced gradient: since torch 2.15 an
        attribute of each parameter, before that one of the group. None: it is not known."""
        parameter = self.parameters[name]
        if hasattr(parameter, "sharded_grad_dtype"):
            found: torch.dtype | None = parameter.sharded_grad_dtype
        else:
            found = getattr(self.group, "_orig_dtype", None)
        return found


def _groups(module: FSDPModule) -> Sequence[Any]:
    """Return torch's groups of a wrapped module; torch 2.11 has one or none."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    _check(state, ("_fsdp_param_group",))
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _check(part: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        raise Error(
            f"FSDP2 of torch {torch.__version__} cannot be compressed by this version of pycomm: "
            f"its {type(part).__name__} has no {', '.join(missing)}. Train without "
            "pycomm.compress, or with a torch that docs/install.md lists"
        )


def units(model: nn.Module) -> Iterator[Unit]:
    """Yield the parts of a model that fully_shard has wrapped, each once.

    Raises:
        Error: this torch's FSDP2 has other parts than those that compression needs.
    """
    names = {id(module): name for name, module in model.named_modules()}
    seen = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups(module):
            if id(group) in seen:
                continue
            seen.add(id(group))
            _check(group, (*_OF_GROUP, *_SEAMS))
            parameters = {}
            for parameter in group.fsdp_params:
                _check(parameter, _OF_PARAMETER)
                info = parameter._module_info
                name = ".".join(filter(None, (names[id(info.module)], info.param_name)))
                parameters[clean(name)] = parameter
            yield Unit(module, group, parameters)


def leave_replicas_to_the_hook(group: Any) -> None:
    """Make torch reduce inside a replica only.

    For HSDP torch itself runs the all-reduce between replicas, before the hook, and has no way to
    replace it. If the group's mesh has no replicating dimension, torch calls the hook alone. The
    parameters keep that dimension, since their placements follow from it.
    """
    old = group.mesh_info
    kind = FSDPMeshInfo if isinstance(old, FSDPMeshInfo) else DataParallelMeshInfo
    new = kind(**{field.name: getattr(old, field.name) for field in fields(kind) if field.init})
    if separate := getattr(old, "reduce_scatter_process_group", None):
        vars(new)["reduce_scatter_process_group"] = separate
    if group.post_forward_mesh_info == old:
        group.post_forward_mesh_info = new
    group.mesh_info = new


class Comm:
    """Base of the classes below."""

    def __init__(self, state: UnitReducer, unit: Unit) -> None:
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


class CompressedAllGather(Comm, AllGather):
    """Compressed all-gather for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; other shards, such as those of fewer ranks after forward, travel exactly."""
        names = tuple(self._unit.parameters)
        if input_tensor.dtype in CODED and input_tensor.numel() == self.state.expects(names):
            work = self.state.all_gather(output_tensor, input_tensor, names, group)
        else:
            work = _all_gather(output_tensor, input_tensor, group=group, async_op=True)
        if work is None or async_op:
            return work
        work.wait()
        return None


class ReplicaHook(Comm):
    """Average over the replicas, for `FSDPModule.set_all_reduce_hook`."""

    def __init__(self, state: UnitReducer, unit: Unit) -> None:
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
