"""Exceptions of pycomm: one class for each reaction that a caller can have."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Error", "PeerLost", "Timeout", "WireMismatch"]


class Error(RuntimeError):
    """Base class of pycomm's errors; also invalid arguments, found before a byte is sent."""


class Timeout(Error):
    """A deadline has passed; the text names the ranks that are missing."""


class PeerLost(Error):
    """A rank has died or left the group.

    Attributes:
        rank: its number in the group.
        ranks: numbers of all ranks that are known to be gone, ascending; the argument for
            `torch.distributed.shrink_group`.
    """

    def __init__(self, message: str, rank: int = -1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = list(ranks) or [rank]

    def __reduce__(self) -> tuple[type[PeerLost], tuple[str, int, list[int]]]:
        return type(self), (str(self), self.rank, self.ranks)


class WireMismatch(Error):
    """Two ranks made different calls: op, order, dtype, size, codec or version differ."""
