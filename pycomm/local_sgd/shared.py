"""What the ranks of `pycomm.LocalSGD` exchange: who contributes what, and the average of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from weakref import WeakSet

import torch
from torch import nn

from pycomm.errors import Error
from pycomm.local_sgd.outer import reals
from pycomm.policy.exchange import start_gather
from pycomm.policy.names import clean
from pycomm.reduction.refusals import LOCAL_SGD, refused
from pycomm.reduction.state import CompressionState
from pycomm.reduction.taken import watching
from pycomm.reduction.weights import factors


@dataclass(frozen=True)
class Contribution:
    """What a rank tells the others of what it contributes to an exchange."""

    weight: float
    """Samples, tokens or steps of its outer gradient."""
    finite: bool
    """Its outer gradient is finite."""
    finishing: bool
    """It has called `finish`, and takes part until all ranks have."""
    dirty: bool
    """Its model differs from the common start."""
    changed: bool
    """Its trained parameters are not those of the beginning."""


@dataclass(frozen=True)
class Average:
    """The ranks' average of an outer gradient, equal on all ranks."""

    values: torch.Tensor
    bad: tuple[int, ...]
    """Ranks whose own outer gradient was not finite."""


def announce(
    state: CompressionState,
    gradient: torch.Tensor,
    weight: float,
    changed: str,
    *,
    finishing: bool = False,
    dirty: bool = True,
) -> Callable[[], list[Contribution]]:
    """Tell the ranks what this one contributes; return a function that waits for theirs.

    On all ranks that function raises Error where `changed` is not empty on any.
    """
    state.follow_members()  # raises if the group has other members now
    mine = Contribution(weight, are_finite([gradient]), finishing, dirty, bool(changed))
    group = state.process_group
    wait = start_gather(list(map(float, astuple(mine))), group, state.reducer.device)

    def hear() -> list[Contribution]:
        told = [Contribution(weight, *map(bool, flags)) for weight, *flags in wait()]
        ranks = [str(rank) for rank, each in enumerate(told) if each.changed]
        if ranks:
            option = "other trained parameters than at first"
            names = changed or "its error names them"
            why = refused(LOCAL_SGD, option, ranks=", ".join(ranks), names=names)
            raise Error(f"rank {group.rank()}: {why}")
        return told

    return hear


def start_average(
    state: CompressionState,
    names: Sequence[str],
    gradient: torch.Tensor,
    announced: Callable[[], list[Contribution]],
    *,
    weighted: bool,
) -> Callable[[], Average]:
    """Begin to average an outer gradient, in place; return a function that waits for the result.

    Args:
        state: codecs and feedback.
        names: parameters of the gradient, in order.
        gradient: this rank's outer gradient.
        announced: result of `announce`.
        weighted: by the weights of the ranks.
    """
    if weighted:
        state.reducer.weights = factors([rank.weight for rank in announced()])
    state.begin_step()
    future = state.reduce(gradient, names)
    state.end_step()

    def finish() -> Average:
        values = state.wait(future)
        bad = [rank for rank, each in enumerate(announced()) if not each.finite]
        return Average(values, tuple(bad))

    return finish


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their names without wrappers."""
    return {clean(name): p for name, p in model.named_parameters()}


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


class InnerOptimizers:
    """The optimizers that have stepped parameters of one model.

    After one gradient that is not finite the moments of AdamW are NaN for ever, and so is each
    further round of that rank. LocalSGD puts the model back to its start, and these states with it.

    Args:
        parameters: function that returns the model's parameters of now, by name.
    """

    def __init__(self, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        watching.add(self)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that has taken a step, if it steps a parameter of the model."""
        if optimizer in self._optimizers:
            return
        ids = set(map(id, self._parameters().values()))
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            self._optimizers.add(optimizer)

    def reset(self) -> list[str]:
        """Set the states of parameters that are not finite to zero, as those of a new optimizer.

        Returns:
            The names of these parameters.
        """
        reset = []
        for name, parameter in self._parameters().items():
            for optimizer in self._optimizers:
                values = optimizer.state.get(parameter, {}).values()
                tensors = [reals(value) for value in values if isinstance(value, torch.Tensor)]
                if not are_finite(tensors):
                    torch._foreach_zero_(tensors)
                    reset.append(name)
        return reset
