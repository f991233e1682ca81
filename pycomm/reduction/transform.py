"""What a state calls of a transform, which an optimizer gives it: pycomm.hooks.momentum has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.policy import Policy

if TYPE_CHECKING:
    from pycomm.reduction.bucket import Bucket

Future = torch.futures.Future[torch.Tensor]


class Transform(Protocol):
    """What takes the place of gradients; `Momenta` says what each method does."""

    @staticmethod
    def policy_of(codec: str | Codec | Policy) -> Policy: ...
    def bind(self, state: Any) -> None: ...
    def exact(self, parameter: torch.Tensor) -> str: ...
    def entered(self, name: str) -> None: ...
    def check_exact(self, names: Sequence[str], why: str) -> None: ...
    def before_step(self, *, absent: bool) -> None: ...
    def step_begun(self) -> None: ...
    def step_ended(self) -> None: ...
    def reduce(self, tensor: torch.Tensor, names: Sequence[str]) -> Future: ...
    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> Callable[[], None]: ...
    def exchange(
        self,
        tensor: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        finish: Callable[[torch.Tensor], object] | None = None,
        **options: Any,
    ) -> torch.Tensor | None: ...
    def drop_step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def keys(self, before: int) -> list[str]: ...
    def load_state_dict(self, saved: Mapping[str, Any]) -> None: ...
