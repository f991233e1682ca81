"""Weights of the ranks in an average: samples, tokens or steps.

The average of values g_i is ``sum(w_i g_i) / sum(w_i)``: each rank multiplies its contribution by
``w_i * ranks / sum(w_i)`` before it is encoded, and the division by the number of ranks stays. So a
residual is in units of the average, whatever the next step weighs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def factors(weights: Sequence[float]) -> list[float]:
    """Return ``w_i * ranks / sum(w)`` of each rank; all zero if no rank has any weight."""
    top = max(weights)
    if top == 0:
        return [0.0] * len(weights)
    parts = [weight / top for weight in weights]  # their sum is finite
    total = math.fsum(parts)
    return [part * len(parts) / total for part in parts]


def weigh(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a contribution in place; 0 also removes what is not finite."""
    if factor == 0:
        tensor.zero_()
    elif factor != 1:
        tensor.mul_(factor)
