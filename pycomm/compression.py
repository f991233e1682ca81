"""Entry point of gradient compression: `compress` and `state_of`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import HookState, compress_hook
from pycomm.hooks.deepspeed import compress_engine, is_deepspeed
from pycomm.hooks.fsdp import compress_shards, state_of_units
from pycomm.hooks.fsdp_seams import units
from pycomm.hooks.megatron import compress_chunk, is_megatron
from pycomm.policy import Policy
from pycomm.reduction.refusals import DDP, refused
from pycomm.reduction.state import CompressionState, DetachedState


def compress(
    model: nn.Module,
    codec: str | Codec | Policy = "int8",
    *,
    feedback: bool | str | Feedback | None = True,
    seed: int = 0,
) -> CompressionState:
    """Compress the gradients of a data-parallel model, from now on.

    Collective: every rank calls it, after the model is wrapped and before the first backward. It
    works with every process group; the backend "pycomm" does the work in C++. The wrapper decides
    which collective is compressed:

    * `DistributedDataParallel`: the all-reduce of the gradients, off the caller's thread.
    * `fully_shard` (FSDP2): the reduce-scatter of the gradients.
    * `fully_shard` on a mesh of two dimensions (HSDP): the all-reduce between replicas.
    * DeepSpeed's engine with ZeRO 1 or 2: the all-reduce of the gradients.
    * Megatron-Core's `DistributedDataParallel`: the all-reduce of its gradient buffers; with its
      distributed optimizer an all-reduce in place of the reduce-scatter.

    Args:
        model: a model in one of these wrappers, compiled or not.
        codec: a codec, its text ("int8", "topk:0.01,values=int8"), a `pycomm.Policy`, or the text
            of one: "auto", "int4 warmup=100", and more in `Policy.of`. A codec leaves norms, biases
            and tiny parameters exact.
        feedback: error feedback. True: the error of each payload is added to the next; False: none;
            or a kind with options, "decay:0.9,storage=int8", see `pycomm.Feedback`.
        seed: seed of random rounding; equal on all ranks.

    Returns:
        The state, with `summary()`, `residual_norms()`, and `state_dict()` for checkpoints.

    Raises:
        TypeError: no wrapper of the model reduces gradients through hooks, or an argument has
            another type.
        ValueError: an unknown codec, or bad options.
        WireMismatch: ranks have different models or codecs; the text names them.
        Error: the model already has a communication hook, or its reducer takes none; or DeepSpeed
            reduces in a way that cannot be compressed.

    Example:
        >>> import pycomm
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> state = pycomm.compress(model, "int4")  # doctest: +SKIP
        >>> print(state.summary())  # doctest: +SKIP
    """
    typed("model", model, nn.Module)
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
    options: dict[str, Any] = {"feedback": feedback, "seed": seed}
    if isinstance(model, DistributedDataParallel):
        wrapped = model
        state = attach(wrapped, lambda: HookState(codec, wrapped, **options))
    elif is_deepspeed(model) or is_megatron(model):
        make = compress_engine if is_deepspeed(model) else compress_chunk
        state = make(codec, model, **options)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        state = compress_shards(codec, model, **options)
    else:
        raise TypeError(
            f"pycomm.compress takes a model wrapped in DistributedDataParallel or fully_shard, not "
            f"{type(model).__name__}: {_advice(model)}"
        )
    return state


def state_of(model: nn.Module) -> CompressionState | None:
    """Return the state of a compressed model, as `compress` returned it.

    Scripts under `pycomm.run` do not call `compress`; they need the state to save it. There, if a
    model in fully_shard or replicate has had no forward yet, this call compresses it; that is
    collective.

    Args:
        model: the model that was given to `compress`, compiled or not, or a module that contains
            it.

    Returns:
        The state; None if nothing of the model is compressed.

    Example:
        >>> state = pycomm.state_of(model)  # doctest: +SKIP
        >>> if state is not None:  # doctest: +SKIP
        ...     saved["pycomm"] = state
    """
    typed("model", model, nn.Module)
    model = getattr(model, "_orig_mod", model)
    for module in model.modules():
        if (hidden := _hidden_ddp(module)) is not None:
            if _late and hidden._init_args:  # its first forward does this
                hidden.lazy_init()
            module = getattr(hidden, "_ddp", module)
        for _, state in getattr(module, "_comm_hooks", []):
            if isinstance(state, CompressionState):
                return state
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    if (found := state_of_units(units(model))) is None:
        for act in _late:
            act(model)
        found = state_of_units(units(model))
    return found


_late: list[Callable[[nn.Module], None]] = []


def compress_late(act: Callable[[nn.Module], None]) -> None:
    """Register a function that `state_of` calls with a fully_shard model not compressed yet."""
    _late.append(act)


def attach(
    model: DistributedDataParallel, make: Callable[[], CompressionState]
) -> CompressionState:
    """Let a state reduce a DDP model's buckets; collective.

    Args:
        model: a model that no hook reduces yet.
        make: function that makes the state.

    Raises:
        Error: the model has a communication hook, or its reducer takes none.
    """
    check_takes_hook(model)
    state = make()
    state.agree()
    model.register_comm_hook(state, compress_hook)
    return state


def check_takes_hook(model: DistributedDataParallel) -> None:
    """Check that a communication hook can be registered with a DDP model.

    Raises:
        Error: the model has one, or its reducer takes none.
    """
    hooks = getattr(model, "_comm_hooks", [])
    if hooks and isinstance(hooks[0][1], DetachedState):  # the model is a copy of a compressed one
        hooks.clear()
    if getattr(model, "_use_python_reducer", False):
        raise Error(refused(DDP, "the reducer of `torch.compile`"))
    if hooks and isinstance(hooks[0][1], CompressionState):
        raise Error(
            "this model is compressed already: change its codec by set_policy() of that state, "
            "which pycomm.compress returned, and pycomm.state_of(model) does; under pycomm.run "
            "--codec leave out this line"
        )
    if hooks:
        hook = hooks[0][0].__qualname__
        raise Error(refused(DDP, "another communication hook", hook=hook))
    if getattr(model, "_delay_all_reduce_all_params", False):
        raise Error(refused(DDP, "`delay_all_reduce_named_params`"))


def _hidden_ddp(module: nn.Module) -> Any:
    """Return what torch keeps of a module in `replicate` of torch.distributed._composable, which
    makes a DistributedDataParallel at its first forward; None: the module is in none."""
    for kept in vars(module).get(STATE_KEY, {}).values():
        if type(kept).__module__ == "torch.distributed._composable.replicate":
            return kept
    return None


def _advice(model: nn.Module) -> str:
    """Return what to do with a model in another wrapper, or in none."""
    names = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in names:
        return "shard it with torch.distributed.fsdp.fully_shard, which FSDP1 has become"
    if "DataParallel" in names:
        return "DataParallel has one process; wrap the module in DistributedDataParallel"
    if any(_hidden_ddp(module) is not None for module in model.modules()):
        return (
            "torch.distributed._composable.replicate makes a DistributedDataParallel at the first "
            "forward: wrap the module in DistributedDataParallel yourself, or use pycomm.run"
        )
    for attribute in ("module", "model"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and (
            isinstance(inner, DistributedDataParallel)
            or any(isinstance(module, FSDPModule) for module in inner.modules())
        ):
            return f"pass what is in it, its .{attribute}"
    return (
        "wrap it first, model = DistributedDataParallel(model); or average its parameters now and "
        "then, pycomm.LocalSGD(model, every=...)"
    )
