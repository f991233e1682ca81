"""What can go wrong, one class per thing a caller can do about it."""

from __future__ import annotations

__all__ = ["Error", "PeerLost", "Timeout", "WireMismatch"]


class Error(RuntimeError):
    """Anything that went wrong in pycomm; also bad arguments, found before a byte is sent."""


class Timeout(Error):
    """A deadline passed; the text names the ranks that did not come."""


class PeerLost(Error):
    """A rank died or left.

    Attributes:
        rank: its number in the group.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class WireMismatch(Error):
    """Two ranks called different things: op, order, dtype, size, codec or version."""
