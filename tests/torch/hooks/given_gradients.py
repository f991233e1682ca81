"""A model whose gradients are those that a test gives it."""

from __future__ import annotations

import torch
from torch import nn

SHAPES = ((61, 37), (33,), (64, 41))  # of odd sizes; two buckets: the first, and the others


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()
