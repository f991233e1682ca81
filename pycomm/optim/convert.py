"""From torch's AdamW and SGD to those whose momentum travels coded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.optim.coded_adamw import CodedAdamW
from pycomm.optim.coded_sgd import CodedSGD
from pycomm.policy import Policy

_OFF = ("amsgrad", "nesterov", "dampening", "maximize", "capturable", "differentiable")


def code_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    codec: str | Codec | Policy = "sign",
    **options: Any,
) -> CodedAdamW | CodedSGD:
    """Return a `CodedAdamW` or `CodedSGD` with the groups and the state of torch's; collective.

    The state is equal on all ranks, as DDP keeps it. The result takes the place of the old
    optimizer, which cannot step, be saved or loaded afterwards. Both have the same groups, so a
    scheduler that was made for the old one sets the rates of the new one.

    Args:
        optimizer: a `torch.optim.AdamW`, or a `torch.optim.SGD` with momentum, new or in the middle
            of training.
        model: the DDP model of its parameters.
        codec: codec of the momentum; see `CodedAdamW`, whose errors it raises.
        options: other options of `CodedAdamW` or `CodedSGD`.

    Raises:
        TypeError: the optimizer is neither.
        ValueError: it has an option that the new one has not, or no momentum.
        Error: it was given to `code_optimizer` before.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # doctest: +SKIP
        >>> optimizer = pycomm.code_optimizer(optimizer, model, "sign")  # doctest: +SKIP
    """
    typed("optimizer", optimizer, torch.optim.Optimizer)
    if getattr(optimizer.step, "replaced", False):
        raise Error(
            "code_optimizer: this optimizer was replaced before: give it the result's to_adamw() "
            "or to_sgd(), and the module in a new DistributedDataParallel"
        )
    given: dict[str, Any] = {"model": model, "codec": codec, **options}
    coded: CodedAdamW | CodedSGD
    if isinstance(optimizer, torch.optim.AdamW):
        _check(optimizer, "CodedAdamW")
        coded = CodedAdamW(optimizer.param_groups, **given)
        coded.take_state(optimizer)
    elif isinstance(optimizer, torch.optim.SGD):
        _check(optimizer, "CodedSGD")
        if not all(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(
                "code_optimizer: the SGD has no momentum that could travel: compress its "
                "gradients, pycomm.compress(model, ...)"
            )
        coded = CodedSGD(optimizer.param_groups, **given)
        coded.take_state(optimizer)
    else:
        raise TypeError(
            f"code_optimizer takes torch.optim.AdamW or SGD, not {type(optimizer).__name__}: "
            "compress the gradients of another optimizer, pycomm.compress(model, ...)"
        )
    optimizer.param_groups = coded.param_groups  # the list, too: groups may be added
    _retire(optimizer, coded)
    return coded


def _check(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Check that a coded optimizer can take the place of one of torch's."""
    for group in optimizer.param_groups:
        if wrong := [name for name in _OFF if group.get(name)]:
            raise ValueError(f"code_optimizer: {who} has no {wrong[0]}: turn it off")


def _retire(optimizer: torch.optim.Optimizer, coded: torch.optim.Optimizer) -> None:
    """Let the methods of an optimizer raise that would act on a state that is no longer used."""
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
    for name in ("step", "state_dict", "load_state_dict", "add_param_group"):
        setattr(optimizer, name, raises)
