"""The model that ranks share between rounds of `pycomm.LocalSGD`, and how it is averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from pycomm.errors import Error
from pycomm.local_sgd.outer import Fragment, Values, broadcast, reals, split
from pycomm.log import logger
from pycomm.policy.exchange import start_gather
from pycomm.policy.names import clean, few
from pycomm.reduction.refusals import LOCAL_SGD, refused
from pycomm.reduction.state import CompressionState
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

    values: Values
    bad: tuple[int, ...]
    """Ranks whose own outer gradient was not finite."""


class SharedModel:
    """A model's trained parameters in fragments, with their common start and their codecs.

    Collective: it copies the first rank's parameters and buffers to all ranks.

    Args:
        model: the model.
        state: codecs and feedback of its parameters.
        fragments, every: see `split`.
        lr, momentum, weighted: see `LocalSGD`.
    """

    def __init__(
        self,
        model: nn.Module,
        state: CompressionState,
        *,
        fragments: int,
        every: int,
        lr: float,
        momentum: float,
        weighted: bool,
    ) -> None:
        self._model, self.state, self._lr, self._weighted = model, state, lr, weighted
        self.rounds = self.skipped = 0  # outer gradients
        self._inner = InnerOptimizers(lambda: named(model))
        group = state.process_group
        self._rank = group.rank()
        broadcast(model, group)
        trained = self.trained()
        self.parts = [
            Fragment(part, momentum=momentum, end=end)
            for part, end in split(trained, fragments, every)
        ]
        for name, parameter in trained.items():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            state.add(name, own.detach())
        state.agree()
        state.plan.complete()

    # ------------------------------------------------------------------ exchanges

    def announce(
        self,
        gradient: Values,
        weight: float,
        changed: str,
        *,
        finishing: bool = False,
        dirty: bool = True,
    ) -> Callable[[], list[Contribution]]:
        """Tell the ranks what this one contributes; return a function that waits for theirs.

        On all ranks that function raises Error where `changed` is not empty on any.
        """
        self.state.follow_members()  # raises if the group has other members now
        mine = Contribution(weight, are_finite(gradient.values()), finishing, dirty, bool(changed))
        row = list(map(float, astuple(mine)))
        wait = start_gather(row, self.state.process_group, self.state.reducer.device)

        def hear() -> list[Contribution]:
            told = [Contribution(weight, *map(bool, flags)) for weight, *flags in wait()]
            ranks = [str(rank) for rank, each in enumerate(told) if each.changed]
            if ranks:
                option = "other trained parameters than at first"
                names = changed or "its error names them"
                why = refused(LOCAL_SGD, option, ranks=", ".join(ranks), names=names)
                raise Error(f"rank {self._rank}: {why}")
            return told

        return hear

    def average(
        self,
        part: Fragment,
        gradient: Values,
        announced: Callable[[], list[Contribution]],
    ) -> Callable[[], Average]:
        """Average outer gradients, in place; return a function that waits for the result.

        Args:
            part: the fragment.
            gradient: this rank's outer gradient.
            announced: result of `announce`.
        """
        if self._weighted:
            self.state.reducer.weights = factors([rank.weight for rank in announced()])
        names = part.names
        self.state.begin_step()
        futures = {width: self.state.reduce(gradient[width], names[width]) for width in gradient}
        self.state.end_step()

        def finish() -> Average:
            values = {width: self.state.wait(future) for width, future in futures.items()}
            bad = [rank for rank, each in enumerate(announced()) if not each.finite]
            return Average(values, tuple(bad))

        return finish

    def move(self, part: Fragment, average: Average) -> bool:
        """Move a fragment's start by an average; return whether it is finite.

        If it is not, the model goes back to the fragment's start on all ranks. A rank whose own
        outer gradient was not finite goes back to the start of all fragments, with new states of
        the inner optimizer where those are not finite either.
        """
        self.rounds += 1
        if are_finite(average.values.values()):  # on all ranks alike
            part.apply(average.values, self._lr)
            return True
        self.state.reducer.check_operations()
        self.skipped += 1
        logger.warning(
            "rank %d: LocalSGD skips round %d, and all ranks go back to its start: the average is "
            "not finite, since the outer gradient of %s",
            self._rank,
            self.rounds,
            f"rank {', '.join(map(str, average.bad))} is not"
            if average.bad
            else "no rank is, and their sum overflows",
        )
        if self._rank in average.bad:
            self.write()
            if names := self._inner.reset():
                logger.warning(
                    "rank %d: LocalSGD has reset the inner optimizer's state, which was not "
                    "finite, of %s",
                    self._rank,
                    few(names),
                )
        else:
            part.write()
        return False

    def write(self) -> None:
        """Write the start of all fragments to the model."""
        for part in self.parts:
            part.write()

    # ------------------------------------------------------------------ parameters

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained now, by name."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation has left whole parameters
        return {name: p for name, p in named(self._model).items() if p.requires_grad}

    def changed(self) -> str:
        """Return the trained parameters that are not those of the beginning; "": there are none."""
        trained = self.trained()
        known = {name: p for part in self.parts for name, p in part.parameters.items()}
        return few([n for n in {**known, **trained} if known.get(n) is not trained.get(n)])

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, *, dirty: bool) -> dict[str, Any]:
        """Return copies of the state to checkpoint.

        Args:
            dirty: this rank's model differs from the common start, and is saved with it.
        """
        return {
            "fragments": [part.state_dict() for part in self.parts],
            "own": [part.values() for part in self.parts] if dirty else None,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "compression": self.state.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`.

        Raises:
            ValueError: the state is of another model, momentum or number of fragments.
        """
        saved = state["fragments"]
        if len(saved) != len(self.parts):
            raise ValueError(
                f"LocalSGD's state has {len(saved)} fragments, not {len(self.parts)}: give the "
                "same exchange="
            )
        for part, one in zip(self.parts, saved, strict=True):
            part.load_state_dict(one)
        self.state.load_state_dict(state["compression"])
        self.rounds, self.skipped = state["rounds"], state["skipped"]
        for index, part in enumerate(self.parts):
            part.write(state["own"] and state["own"][index])


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their names without wrappers."""
    return {clean(name): p for name, p in model.named_parameters()}


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


_everybody: WeakSet[InnerOptimizers] = WeakSet()


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
        _everybody.add(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
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


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for optimizers in list(_everybody):
        optimizers.note(optimizer)


register_optimizer_step_post_hook(_note)
