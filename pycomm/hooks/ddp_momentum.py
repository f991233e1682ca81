"""The momenta of a model in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from pycomm.errors import Error
from pycomm.hooks.momentum import Momenta
from pycomm.momentum.moment import CodedMoment
from pycomm.reduction.refusals import MOMENTA, refused
from pycomm.reduction.taken import GradientHook


class DDPMomenta(Momenta):
    """The momenta of a DDP model; arguments as for `Momenta`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._handles: dict[str, Any] = {}  # of the coded parameters that get gradients
        self._looked: set[str] = set()  # those that this backward has reached,
        self._filled: set[str] = set()  # and that had a gradient then which no step has used

    def _make_moment(self, name: str) -> CodedMoment | None:
        made = super()._make_moment(name)
        if made is not None:
            self._watch(name, made.parameter)
        return made

    def _watch(self, name: str, parameter: torch.Tensor) -> None:
        """Look at a gradient before a backward adds to it, unless the parameter is frozen."""
        if name not in self._handles and parameter.requires_grad:
            handle = parameter.register_hook(GradientHook(self, name))  # type: ignore[no-untyped-call]
            self._handles[name] = handle

    def step_begun(self) -> None:
        """See `Momenta`. Parameters that were frozen may get gradients now."""
        super().step_begun()
        self._forget_looks()
        for name, moment in self.moments.items():
            self._watch(name, moment.parameter)

    def check_reduced(self, name: str, parameter: torch.Tensor) -> None:
        """See `Momenta`. DDP's buckets have all parameters but these."""
        if id(parameter) not in self.reducer.names and name not in self.state.adapter.ignored:
            raise Error(
                f"rank {self.state.process_group.rank()}: {name} was frozen when the model was "
                "wrapped, so DDP does not average its gradient, and ranks would differ: wrap the "
                "module in a new DistributedDataParallel, and make the optimizer anew"
            )

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP in place; see `Adapter.reduce_bucket`.

        Raises:
            Error: Join shadows this rank, which has no data in this step.
        """
        if self.moments and torch._C._current_graph_task_id() == -1:
            raise Error(f"rank {self.state.process_group.rank()}: {refused(MOMENTA, '`Join`')}")
        # Matrices have the rows and columns of the parameter's indices, also if a channels_last
        # model has another order in memory: so have second moments and residuals, which are saved.
        parameters = bucket.parameters()
        for parameter in parameters:  # in most models there is none
            if not parameter.is_contiguous() and _is_strided(parameter):
                break
        else:
            return self.state.adapter.reduce_bucket(self.state, bucket)
        strided = [
            (gradient, gradient.as_strided(parameter.shape, parameter.stride()))
            for gradient, parameter in zip(bucket.gradients(), parameters, strict=True)
            if _is_strided(parameter)
        ]
        for gradient, as_it_lies in strided:
            gradient.copy_(as_it_lies.clone())
        future = self.state.adapter.reduce_bucket(self.state, bucket)

        def restore(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            result = done.value()
            for gradient, as_it_lies in strided:
                as_it_lies.copy_(gradient.clone())
            return result

        return future.then(restore)

    def _has_momentum(self) -> bool:
        for name in self._handles:  # a frozen one had no gradient
            self.look(name)
        found = bool(self._filled)
        self._forget_looks()
        return found

    def _forget_looks(self) -> None:
        self._looked.clear()
        self._filled.clear()

    def look(self, name: str) -> None:
        """See whether a gradient holds what no step has used, before a backward adds to it."""
        if not self._unused or name in self._looked:
            return
        self._looked.add(name)
        gradient = self.moments[name].parameter.grad
        if gradient is not None and gradient.any():
            self._filled.add(name)


def _is_strided(parameter: torch.Tensor) -> bool:
    """Return whether DDP's buckets have a parameter's gradient in another order than its indices.

    They have the order of its memory if that is without gaps. `GradBucket.gradients()` shows it as
    if it were that of the indices.
    """
    if parameter.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != extent:
            return False
        extent *= size
    return True
