"""One line that makes a model's gradients travel compressed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import HookState, compress_hook
from pycomm.policy import Policy


def compress(
    model: nn.Module,
    spec: str | Codec | Policy = "int8",
    *,
    feedback: bool | str | Feedback | None = True,
    seed: int = 0,
) -> HookState:
    """Compress the gradients of a model that is wrapped in DistributedDataParallel, from now on.

    Collective: every rank calls it, after the model is wrapped and before the first backward. It
    works with every process group; the backend "pycomm" does the work off the caller's thread.

    Args:
        model: a DistributedDataParallel model, compiled or not.
        spec: a codec, its text ("int8", "int4", "quant:bits=4,block=64"), a `pycomm.Policy`, or the
            text of one: "auto", "int4 warmup=100", and more in `Policy.of`. A codec
            leaves norms, biases and tiny parameters exact.
        feedback: what becomes of the error of each payload: True, it is added to the next; False;
            or a kind with options, "ema:0.9,storage=int8", see `pycomm.Feedback`.
        seed: of random rounding; equal on all ranks.

    Returns:
        The hook's state: `summary()`, `residual_norms()`, and `state_dict()` for checkpoints.

    Raises:
        TypeError: the model is not wrapped in DistributedDataParallel.
        ValueError: an unknown codec, or bad options.
        WireMismatch: ranks have different models or codecs; the text names them.
        Error: the model has a communication hook already, or does not use them.

    Example:
        >>> import pycomm
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> state = pycomm.compress(model, "int4")  # doctest: +SKIP
        >>> print(state.summary())  # doctest: +SKIP
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"pycomm.compress takes a model wrapped in DistributedDataParallel, not "
            f"{type(model).__name__}: wrap it first, model = DistributedDataParallel(model)"
        )
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
    state = HookState(spec, model, feedback=feedback, seed=seed)
    state.agree()
    model.register_comm_hook(state, compress_hook)
    return state


class _Function(ModuleType):
    """An import of this module puts it where `pycomm.compress`, the function, is expected."""

    def __call__(self, *args: Any, **kwargs: Any) -> HookState:
        return compress(*args, **kwargs)


sys.modules[__name__].__class__ = _Function
