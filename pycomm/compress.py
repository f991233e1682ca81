"""One line that makes a model's gradients travel compressed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import HookState, compress_hook
from pycomm.hooks.fsdp import FSDPState
from pycomm.hooks.replicas import watch_if_asked
from pycomm.hooks.state import CompressionState
from pycomm.policy import Policy


def compress(
    model: nn.Module,
    spec: str | Codec | Policy = "int8",
    *,
    feedback: bool | str | Feedback | None = True,
    seed: int = 0,
    weights: str | Codec | Policy | None = None,
) -> CompressionState:
    """Compress the gradients of a data-parallel model, from now on.

    Collective: every rank calls it, after the model is wrapped and before the first backward. It
    works with every process group; the backend "pycomm" does the work in C++. What travels
    compressed depends on the wrapper:

    * `DistributedDataParallel`: the all-reduce of the gradients, off the caller's thread.
    * `fully_shard` (FSDP2): the reduce-scatter of the gradients.
    * `fully_shard` on a mesh of two dimensions (HSDP): the all-reduce between replicas.

    Args:
        model: a model that one of these has wrapped, compiled or not.
        spec: a codec, its text ("int8", "topk:0.01,values=int8"), a `pycomm.Policy`, or the text of
            one: "auto", "int4 warmup=100", and more in `Policy.of`. "dgc:0.01" is top-k with all
            of Deep Gradient Compression. A codec leaves norms, biases and tiny parameters exact.
        feedback: what becomes of the error of each payload: True, it is added to the next; False;
            or a kind with options, "ema:0.9,storage=int8", see `pycomm.Feedback`.
        seed: of random rounding; equal on all ranks.
        weights: for FSDP2 only, a codec of the parameters when they are gathered, such as "bf16" or
            "int8". No feedback makes up for what it loses: each rank computes with such weights.

    Returns:
        The state: `summary()`, `residual_norms()`, and `state_dict()` for checkpoints.

    Raises:
        TypeError: the model is wrapped in nothing that reduces gradients through hooks.
        ValueError: an unknown codec, bad options, or a codec that this wrapper cannot use.
        WireMismatch: ranks have different models or codecs; the text names them.
        Error: the model has a communication hook already, or does not use them.

    Example:
        >>> import pycomm
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> state = pycomm.compress(model, "int4")  # doctest: +SKIP
        >>> print(state.summary())  # doctest: +SKIP
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
    if isinstance(model, DistributedDataParallel):
        if weights is not None:
            raise ValueError("weights= is for fully_shard: DistributedDataParallel gathers none")
        state: CompressionState = _compress_ddp(model, spec, feedback=feedback, seed=seed)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        state = FSDPState(spec, model, weights=weights, feedback=feedback, seed=seed)
    else:
        raise TypeError(
            f"pycomm.compress takes a model wrapped in DistributedDataParallel or fully_shard, not "
            f"{type(model).__name__}: {_advice(model)}"
        )
    watch_if_asked(model)
    return state


def _compress_ddp(
    model: DistributedDataParallel, spec: str | Codec | Policy, **options: Any
) -> HookState:
    if hooks := getattr(model, "_comm_hooks", []):
        raise Error(
            f"the model has the communication hook {hooks[0][0].__qualname__} already, and DDP "
            "takes one: wrap the module in a new DistributedDataParallel to change it"
        )
    if getattr(model, "_delay_all_reduce_all_params", False):
        raise Error(
            "this model reduces its gradients after backward (delay_all_reduce_named_params) and "
            "uses no communication hook; wrap it without that option"
        )
    state = HookState(spec, model, **options)
    state.agree()
    model.register_comm_hook(state, compress_hook)
    return state


def _advice(model: nn.Module) -> str:
    """What to do with a model that is wrapped in something else, or in nothing."""
    names = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in names:
        return "shard it with torch.distributed.fsdp.fully_shard, which FSDP1 has become"
    if "DataParallel" in names:
        return "DataParallel has one process; wrap the module in DistributedDataParallel"
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


class _Function(ModuleType):
    """An import of this module puts it where `pycomm.compress`, the function, is expected."""

    def __call__(self, *args: Any, **kwargs: Any) -> CompressionState:
        return compress(*args, **kwargs)


sys.modules[__name__].__class__ = _Function
