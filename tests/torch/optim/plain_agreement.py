"""The share of the ranks' squares that belongs to their mean, in plain torch, for formulas."""

from __future__ import annotations

import torch

from pycomm.reduction.momentum import agreement


class Agreement:
    """What share of the gradients' squares is that of their mean, from one random number a row."""

    def __init__(self, rows: int, columns: int) -> None:
        self.stride, self.columns = max(1, -(-rows // agreement.ROWS)), columns
        self.steps, self.energies = 0, [0.0, 0.0]

    def share(self, gs: list[torch.Tensor], beta2: float) -> float:
        signs = agreement.signs_of(self.columns, self.steps, torch.device("cpu"))
        matrices = [g.view(-1, self.columns)[self.steps % self.stride :: self.stride] for g in gs]
        found = [matrix @ signs for matrix in matrices]
        mean = sum(found) / len(gs)
        squares = mean.square().sum(), sum(z.square().sum() for z in found) / len(gs)
        self.energies = [
            beta2 * before + (1 - beta2) * float(now)
            for before, now in zip(self.energies, squares, strict=True)
        ]
        self.steps += 1
        of_mean, own = self.energies
        return round(256 * min(1.0, max(1 / len(gs), of_mean / own))) / 256
