"""One step of a state: what its buckets have left behind, and whether that is kept.

The order of events is that of `StepStatus`. A step is open from `begin_step` on; `end_step` makes
it reduced. `settle`, at the latest when the next step begins, commits it if all of its results are
finite; else it has overflowed. If its gradients were discarded, or an exception has ended it before
`end_step`, it is rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from pycomm.reduction.bucket import BucketPiece


class StepStatus(Enum):
    """Where a step is; from one status only later ones follow."""

    OPEN = "open"
    """Buckets may still be reduced."""
    REDUCED = "reduced"
    """All of its buckets have been given to `reduce`."""
    COMMITTED = "committed"
    """The residuals that it has written are the current ones."""
    ROLLED_BACK = "rolled back"
    """Residuals are as they were before it."""
    OVERFLOWED = "overflowed"
    """The same, since a result was not finite."""


class Flags(dict[torch.device, torch.Tensor]):
    """A flag on each device that is asked for: float32 [1], at first 0."""

    def __missing__(self, device: torch.device) -> torch.Tensor:
        flag = self[device] = torch.zeros(1, dtype=torch.float32, device=device)
        return flag


class Step:
    """What belongs to one step of a state on this rank.

    Args:
        number: its number, from 1; 0: none was taken yet.
        status: where it is.
        joined: this rank has no data in it, and Join shadows it.
        parameters: number of parameters that the state had when it began.
    """

    def __init__(
        self,
        number: int,
        status: StepStatus = StepStatus.OPEN,
        *,
        joined: bool = False,
        parameters: int = 0,
    ) -> None:
        self.number, self.status = number, status
        self.joined, self.parameters = joined, parameters
        self.busy_until = ""
        """What a user calls before the residuals can be read: buckets are on the way that backward
        does not wait for; "": none are."""
        self.entered: set[Any] = set()
        """What has begun to be reduced in it, where a trainer has to know it."""
        self.checks: list[Callable[[], bool]] = []
        """Wait for a result each, and return whether it is finite."""
        self.found_inf = Flags()
        """Not 0: a result is not finite of those whose payloads Python has moved. Ranks have
        rows to themselves, whose flags they share in `end_step`."""
        self.pieces: dict[str, BucketPiece] = {}
        """The pieces with a residual that took part, by name."""
        self.flushed: set[str] = set()
        """Parameters that have no residual any more once it is committed."""
        self.discarded: set[str] = set()
        """Parameters whose gradients were thrown away: their residuals stay as they were."""
        self.unused: set[str] = set()
        """Parameters that no rank has used, whose gradients DDP leaves as they are: likewise."""

    def kept(self) -> set[str]:
        """Return the parameters whose residuals are kept if the step is committed."""
        return self.pieces.keys() - self.unused - self.discarded

    def end(self, *, finite: bool, committed: bool) -> None:
        """End the step: the residuals of all of its parameters are decided."""
        undone = StepStatus.ROLLED_BACK if finite else StepStatus.OVERFLOWED
        self.status = StepStatus.COMMITTED if committed else undone
        for left in (self.checks, self.found_inf, self.pieces, self.flushed, self.discarded):
            left.clear()
