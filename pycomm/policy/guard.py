"""Options of the quality guard; `pycomm.policy.samples` implements it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycomm.arguments import number, put, whole

_MARGIN = 1.5
"""Factor for the differences between blocks of a tensor: on heavy tails the error of 256 values is
seldom this much above that of all."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Options of checks that compare samples of reduced gradients with their exact average.

    The cost of a check is bounded twice. It moves at most ``share`` of the payload bytes between
    two checks. Its time is measured, and while it is more than ``share`` of the time between two
    checks, the interval doubles. Both together stay below 2 * ``share``.
    """

    every: int = 16
    """Steps from one check to the next; three steps later for a parameter above its limit."""
    parameters: int = 8
    """Number of parameters in one check; the following parameters are in the next check."""
    share: float = 0.004
    """The largest cost of checks, as a fraction of bytes and of time each."""
    limit: float | None = None
    """Limit of an all-reduce's relative error. None: 1, where sending nothing would be as good; for
    codecs whose error on normal values is less than a half, half way from that error to 1; and
    never less than 1.5 times the error of the codec's all-reduce on normal values that differ as
    much from rank to rank. A parameter above the limit in two successive checks is warned about and
    moves to a finer codec."""
    escalate: bool = True
    """Tells whether such a parameter moves to a finer codec; else there is only the warning."""

    def limit_of(self, nominal: float, reduced: float) -> float:
        """Return the limit of a codec, from its errors on normal values.

        Args:
            nominal: error of one coding. Sparse codecs are near 1 by design. Some unbiased codecs
                are above 1: their errors cancel over many steps, so they have no limit.
            reduced: error of a whole all-reduce, which a check measures.
        """
        if self.limit is not None:
            return self.limit
        if nominal >= 1:
            return math.inf
        return max((1 + nominal) / 2 if nominal < 0.5 else 1.0, _MARGIN * reduced)

    def __post_init__(self) -> None:
        for name in ("every", "parameters"):
            put(self, **{name: whole(f"guard: {name}", getattr(self, name), 1)})
        put(self, share=number("guard: share", self.share))
        if not 0 < self.share <= 1:
            raise ValueError(f"guard: share={self.share} must be above 0 and at most 1")
