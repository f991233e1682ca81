"""Training steps beside the shortest that a link allows, whatever sends the gradients.

Backward makes the buckets of the gradients ready one after the other. The link cannot begin before
the first one, and the last bucket cannot leave before backward has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL = 0.95
"""Share of a link's rate that is left for payloads beside the headers."""


@dataclass(frozen=True)
class Pace:
    """The parts of a step without communication, in seconds."""

    first: float
    """From the start of the step until the first bucket is ready."""
    compute: float
    """Forward and backward, which ends when the last bucket is ready."""
    optimizer: float
    last: float
    """Share of the last bucket in the gradients."""

    def bound(self, wire: float) -> float:
        """Return the shortest step.

        Args:
            wire: seconds of the link for all that a node sends in a step; see `wire_seconds`.
        """
        sent = max(self.first + wire, self.compute + self.last * wire)
        return max(self.compute, sent) + self.optimizer


def wire_seconds(sent: float, rate: float) -> float:
    """Return the seconds in which a link carries so many bytes.

    Args:
        sent: bytes.
        rate: bytes per second.
    """
    return sent / (FULL * rate)
