"""Positions of the largest values of each chunk of a parameter."""

from __future__ import annotations

import torch
from torch.nn import functional as F

_MOST = 4096  # values of a chunk


class Places:
    """How the values of a parameter are cut into chunks of equal size, with zeros behind.

    Args:
        numel: number of values, at least one.
        density: share of the values that are chosen of a chunk; at least one is.
    """

    def __init__(self, numel: int, density: float) -> None:
        self._numel = numel
        self.chunks = -(-numel // _MOST)
        """Number of chunks."""
        self._size = -(-numel // self.chunks)
        self.each = max(1, min(self._size, round(density * self._size)))
        """Number of values that are chosen of each chunk."""
        self.chosen = self.chunks * self.each
        """Number of values that are chosen of all chunks."""

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [numel] by chunk, float32 [chunks, size]."""
        padding = self.chunks * self._size - self._numel
        return F.pad(values.reshape(-1), (0, padding)).view(self.chunks, self._size)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [numel] of chunks."""
        return rows.view(-1)[: self._numel]

    def choose(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the positions of the largest magnitudes, int16 [chunks, each]."""
        if not len(rows):
            return torch.empty(0, self.each, dtype=torch.int16, device=rows.device)
        return rows.abs().topk(self.each, dim=1).indices.to(torch.int16)
