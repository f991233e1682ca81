"""The seams of torch's FSDP2: what a wrapped model consists of, and what takes the place of its
communication. `pycomm.hooks.fsdp` says what that does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

from pycomm.hooks.reducer import CODED

if TYPE_CHECKING:
    from pycomm.hooks.fsdp import FSDPState

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

    def only_views(self, result: torch.Tensor) -> bool:
        """Whether torch will not look at a result before backward ends, so that it may come later.

        It puts views of it where the gradients are, unless it has to convert, divide or add it to
        gradients that are there, or somebody waits for them.
        """
        trained = [self.parameters[name].sharded_param for name in self.trained()]
        return (
            result.is_cpu
            and result.dtype == self.group._orig_dtype
            and result.dtype in (torch.float32, torch.bfloat16)
            and self.group.gradient_divide_factor is None
            and not self.group.force_sum_reduction_for_comms
            and all(p.grad is None for p in trained)
            and not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained)
        )


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


def leave_replicas_to_the_hook(group: Any) -> None:
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
        """Reduce; the result is there when this returns, or when backward does."""
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
            later=self._unit.only_views(output_tensor),
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
            later = self._unit.only_views(reduce_output)
            self._state.all_reduce(reduce_output, self._unit.trained(), later=later)
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
