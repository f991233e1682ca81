"""From torch's AdamW, Adam and SGD to those whose momentum travels coded."""

from __future__ import annotations

import functools
from typing import Any, NoReturn, overload

import torch
from torch import nn

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.optim.coded_adamw import CodedAdamW
from pycomm.optim.coded_sgd import CodedSGD
from pycomm.optim.optimizer import check_settings
from pycomm.policy import Policy
from pycomm.reduction.refusals import MOMENTA, refused


@overload
def code_optimizer(
    optimizer: torch.optim.Adam,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> CodedAdamW: ...
@overload
def code_optimizer(
    optimizer: torch.optim.SGD,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> CodedSGD: ...
@overload
def code_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> torch.optim.Optimizer: ...
def code_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> torch.optim.Optimizer:
    """Return a `CodedAdamW` or `CodedSGD` with the groups and the state of torch's; collective.

    The state is equal on all ranks, as DDP keeps it. The result takes the place of the old
    optimizer, which cannot step, be copied, saved or loaded afterwards. Both have the same groups,
    so a scheduler that was made for the old one sets the rates of the new one.

    An optimizer that Accelerate has prepared stays the same object, which schedulers, checkpoints
    and the HF Trainer hold: the optimizer in it is replaced, as its attribute ``optimizer``.

    Args:
        optimizer: a `torch.optim.AdamW`, an `Adam` without weight decay, or an `SGD` with momentum,
            new or in the middle of training; or Accelerate's wrapper of one.
        model: the model of its parameters, in `DistributedDataParallel`, `fully_shard` or
            `replicate`.
        codec: codec of the momentum; see `CodedAdamW`, whose errors it raises.
        options: other options of `CodedAdamW` or `CodedSGD`. Accelerate's wrapper brings `scaler`.

    Raises:
        TypeError: the optimizer is none of these.
        ValueError: it has an option that the new one has not, or no momentum.
        Error: it was given to `code_optimizer` before.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # doctest: +SKIP
        >>> optimizer = pycomm.code_optimizer(optimizer, model, "sign")  # doctest: +SKIP
    """
    typed("optimizer", optimizer, torch.optim.Optimizer)
    wrapped = vars(optimizer).get("optimizer")
    if isinstance(wrapped, torch.optim.Optimizer):
        if getattr(optimizer, "scaler", None) is not None:
            options.setdefault("scaler", optimizer.scaler)  # type: ignore[attr-defined]
        _put_into_wrapper(optimizer, code_optimizer(wrapped, model, codec, **options))
        return optimizer
    if getattr(optimizer.step, "replaced", False):
        raise Error(
            "code_optimizer: this optimizer was replaced before: give it the result's to_adamw() "
            "or to_sgd(), and the module in a new DistributedDataParallel"
        )
    kind = _kind_of(optimizer)
    coded = kind(
        optimizer.param_groups, **_defaults(optimizer), model=model, codec=codec, **options
    )
    coded.take_state(optimizer)
    optimizer.param_groups = coded.param_groups  # the list, too: groups may be added
    _retire(optimizer, coded)
    return coded


def _put_into_wrapper(wrapper: Any, coded: torch.optim.Optimizer) -> None:
    """Let Accelerate's wrapper hold a coded optimizer.

    With a GradScaler the wrapper keeps bound methods of the former one. It takes a call of `step`
    for a step that was taken, and a coded optimizer skips its own: by what the scaler has found.
    """
    wrapper.optimizer = coded
    if getattr(wrapper, "scaler", None) is None:
        return
    step = wrapper._optimizer_original_step_method = coded.step

    @functools.wraps(step)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        found_inf = getattr(coded, "found_inf", None)  # on any rank
        wrapper._accelerate_step_called = found_inf is None or not float(found_inf)
        return result

    wrapper._optimizer_patched_step_method = patched


def _kind_of(optimizer: torch.optim.Optimizer) -> type[CodedAdamW] | type[CodedSGD]:
    """Return the coded form of an optimizer of torch.

    Raises:
        TypeError, ValueError: it has none; as for `code_optimizer`.
    """
    groups = optimizer.param_groups
    is_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one of its kind
    if is_adam or isinstance(optimizer, torch.optim.SGD):
        for group in groups:
            check_settings(f"code_optimizer: Coded{'AdamW' if is_adam else 'SGD'}", group)
    if is_adam:
        coupled = not isinstance(optimizer, torch.optim.AdamW)
        if any(
            coupled and group["weight_decay"] and not group.get("decoupled_weight_decay")
            for group in groups
        ):
            raise ValueError(f"code_optimizer: {refused(MOMENTA, 'weight decay of `Adam`')}")
        return CodedAdamW
    if isinstance(optimizer, torch.optim.SGD):
        if not all(group["momentum"] for group in groups):
            raise ValueError(f"code_optimizer: {refused(MOMENTA, 'SGD without momentum')}")
        return CodedSGD
    why = refused(MOMENTA, "other optimizers", name=type(optimizer).__name__)
    raise TypeError(f"code_optimizer {why}")


def _defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings that groups have which are added later."""
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    return {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}


def _retire(optimizer: torch.optim.Optimizer, coded: torch.optim.Optimizer) -> None:
    """Let the methods of an optimizer raise that would use or copy a state that is not used now."""
    old, new = type(optimizer).__name__, type(coded).__name__

    def raises(*_: Any, **__: Any) -> NoReturn:
        raise Error(
            f"pycomm.code_optimizer has replaced this {old} by a {new}: use its result, optimizer "
            "= pycomm.code_optimizer(optimizer, model, ...), also in what has got the old one"
        )

    raises.replaced = True  # type: ignore[attr-defined]
    # A scheduler that was made for the old one looks at these, and would warn.
    raises._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for name in ("step", "state_dict", "load_state_dict", "add_param_group", "__getstate__"):
        setattr(optimizer, name, raises)
