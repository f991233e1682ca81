"""DiLoCo under torchft's Manager, whose outer gradients travel compressed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torchft import local_sgd
from torchft.manager import Manager

from pycomm.codecs import Codec
from pycomm.elastic.parts import local
from pycomm.feedback import Feedback
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.torchft.state import ManagedState


class DiLoCo(local_sgd.DiLoCo):  # type: ignore[misc]
    """torchft's (Streaming) DiLoCo with compressed outer gradients.

    Replicas train alone for ``sync_every`` steps, then average how far each has moved, and the
    outer optimizer takes that as its gradient (Douillard et al., "DiLoCo", arXiv:2311.08105; of a
    fragment at a time: "Streaming DiLoCo", arXiv:2501.18512). Here the movements travel by a codec,
    with the feedback of what it loses. The rest is torchft's: an outer step that is not committed
    puts the parameters back, and here the residuals, too. The average is over the participants. A
    replica that heals gets the others' parameters, and owes nothing; who stays keeps what it owes
    when members change.

    Args:
        manager: a Manager with ``use_async_quorum=False`` and a `ProcessGroupPycomm`.
        fragments: parts of the model, of which one is averaged at a time.
        inner_optimizer: the optimizer of the local steps.
        outer_optimizer: that of the averages; one, or one for each fragment.
        sync_every: local steps between two averages of the same fragment.
        codec: a codec, a policy, or the text of either; see `pycomm.compress`. "fp32" is exact.
        feedback: see `pycomm.compress`.
        seed: see `pycomm.compress`.
        options: other arguments of torchft's class, such as ``fragment_sync_delay``.

    Attributes:
        states: codecs and residuals of each fragment; see `pycomm.CompressionState`.

    Raises:
        TypeError: the Manager has another process group.
        ValueError: an unknown codec, or bad options.
        WireMismatch: in a step: this replica joins others with another model or codec.

    Example:
        >>> with DiLoCo(manager, [net], adamw, sgd, 100, codec="int4"):  # doctest: +SKIP
        ...     for batch in data:
        ...         train(batch)  # and adamw.step()
    """

    def __init__(
        self,
        manager: Manager,
        fragments: list[nn.Module],
        inner_optimizer: optim.Optimizer,
        outer_optimizer: optim.Optimizer | list[optim.Optimizer],
        sync_every: int,
        *,
        codec: str | Codec | Policy = "int4",
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name in ("should_quantize", "use_bucketization", "bucket_cap_mb"):
            if options.get(name):
                raise ValueError(f"{name}: a fragment is one bucket, which the codec compresses")
        super().__init__(
            manager, fragments, inner_optimizer, outer_optimizer, sync_every, **options
        )
        self.states: list[ManagedState] = []
        for number, fragment in enumerate(self._fragments):
            state = ManagedState(
                manager,
                codec,
                key=f"pycomm/fragment {number}",
                feedback=feedback,
                seed=seed + number,
            )
            for name, parameter in fragment._model_fragment.named_parameters():
                state.add(clean(name), local(parameter))
            state.plan.complete()
            self.states.append(state)
            fragment._average_grads = partial(_average, fragment, state)


class _Average:
    """A bucket under way, in the place of a Work: its result goes back where it came from."""

    def __init__(
        self, future: torch.futures.Future[torch.Tensor], movements: list[torch.Tensor]
    ) -> None:
        self._future, self._movements = future, movements

    def wait(self) -> None:
        result = self._future.wait()
        parts = torch.split(result, [movement.numel() for movement in self._movements])
        for movement, part in zip(self._movements, parts, strict=True):
            movement.copy_(part.view_as(movement))


def _average(fragment: Any, state: ManagedState) -> None:
    """Begin to average a fragment's movements, a bucket for each dtype."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, movement in fragment._grads.items():
        by_dtype.setdefault(movement.dtype, []).append(name)
    buckets = list(by_dtype.values())
    for number, names in enumerate(buckets):
        movements = [fragment._grads[name] for name in names]
        future = state.reduce_managed(
            torch.cat([movement.reshape(-1) for movement in movements]),
            [clean(name) for name in names],
            first=number == 0,
            last=number + 1 == len(buckets),
        )
        fragment._allreduce_work.append(_Average(future, movements))
