"""The units of a model in torch's FSDP2, whose collectives `pycomm.hooks.fsdp` replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

from pycomm.errors import Error
from pycomm.policy.names import clean

# The attributes of FSDPParamGroup that compression replaces.
_SEAMS = ("_reduce_scatter_comm", "_all_reduce_hook", "mesh_info", "post_forward_mesh_info")

# All other parts of torch's FSDPParamGroup and FSDPParam that compression reads, which are private:
# torch 2.11 to 2.15 have them.
_OF_GROUP = (
    "fsdp_params",
    "all_reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "finalize_backward",
)
_OF_PARAMETER = ("_module_info", "sharded_param")


@dataclass(frozen=True, eq=False)
class Unit:
    """One fully_shard call's parameters, which travel together."""

    module: FSDPModule
    group: Any
    """torch's FSDPParamGroup."""
    parameters: dict[str, Any]
    """torch's FSDPParam by name, in the order of `group`."""

    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that get gradients, in the order of the message.

        It is that of the parameters; since torch 2.15 it is sorted by the gradients' dtypes, from
        the first forward on.
        """
        names = list(self.parameters)
        order = getattr(self.group, "_reduce_scatter_param_indices", ()) or range(len(names))
        parameters = self.parameters
        return tuple(names[i] for i in order if parameters[names[i]].sharded_param.requires_grad)

    def reduced_in(self) -> set[torch.dtype | None]:
        """The dtypes that the policies of mixed precision ask for in reductions: since torch 2.15
        there is one for each parameter, before that one for the group."""
        holders = [self.group] if hasattr(self.group, "mp_policy") else self.parameters.values()
        for holder in holders:
            _check(holder, ("mp_policy",))
        return {getattr(holder.mp_policy, "reduce_dtype", None) for holder in holders}


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
        _check(module._get_fsdp_state(), ("_state_ctx",))
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


def after_finalizing(group: Any, act: Callable[[], None]) -> None:
    """Call a function whenever torch has finished the reductions of a group.

    It does so at the end of a backward; pipelines, after all of their backwards.
    """
    finalize = group.finalize_backward

    def finalize_backward() -> None:
        finalize()
        act()

    group.finalize_backward = finalize_backward


def is_in_backward(units: Sequence[Unit]) -> bool:
    """Return whether torch will finish the reductions of a unit at the end of a backward.

    That is the outermost one of those that reentrant checkpoints run within each other.
    """
    contexts = (unit.module._get_fsdp_state()._state_ctx for unit in units)
    return any(context.post_backward_final_callback_queued for context in contexts)


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
