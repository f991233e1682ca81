"""The quality guard's options; `pycomm.policy.samples` does its work."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Every few steps a sample of what was reduced is also reduced exactly, and compared.

    The cost is bounded twice. A check moves at most ``share`` of the payload bytes between two
    checks. Its time is measured, and where it is more than ``share`` of the time between two
    checks, checks become rarer by two, again and again. Both together stay below 2 * ``share``.
    """

    every: int = 16
    """Steps from one check to the next."""
    parameters: int = 8
    """Parameters in one check; the next ones come in the next."""
    share: float = 0.004
    """The most that checks may cost, as a part of bytes and of time each."""
    limit: float | None = None
    """Relative error of a coding that is too much. None: 1, where sending nothing would be as good;
    and for codecs that do to normal values less than a half, half way from there to 1. A parameter
    that is above it in two checks in a row is warned about and moves to a finer codec."""
    escalate: bool = True
    """Whether it moves; else the warning is all."""

    def limit_of(self, nominal: float) -> float:
        """Return the limit of a codec, by its error on normal values.

        Sparse codecs are near 1 by what they are, and unbiased ones above it: they have none.
        """
        if self.limit is not None:
            return self.limit
        if nominal >= 1:
            return math.inf
        return (1 + nominal) / 2 if nominal < 0.5 else 1.0

    def __post_init__(self) -> None:
        if self.every < 1 or self.parameters < 1:
            raise ValueError("guard: every and parameters must be at least 1")
        if not 0 < self.share <= 1:
            raise ValueError(f"guard: share={self.share} must be above 0 and at most 1")
