"""What can go wrong, one class per thing a caller can do about it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Error", "PeerLost", "Timeout", "WireMismatch"]


class Error(RuntimeError):
    """Anything that went wrong in pycomm; also bad arguments, found before a byte is sent."""


class Timeout(Error):
    """A deadline passed; the text names the ranks that did not come."""


class PeerLost(Error):
    """A rank died or left.

    Attributes:
        rank: its number in the group.
        ranks: those of all ranks that are known to be gone, ascending: what to give to
            `torch.distributed.shrink_group`.
    """

    def __init__(self, message: str, rank: int = -1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = list(ranks) or [rank]


class WireMismatch(Error):
    """Two ranks called different things: op, order, dtype, size, codec or version."""
