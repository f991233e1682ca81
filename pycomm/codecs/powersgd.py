"""powersgd: a matrix as the product of two thin factors (Vogels et al. 2019, "PowerSGD").

As a codec of one tensor it is one step of power iteration from a random start, which shows the
error of a first step. Ranks that train together do better: they average the factors themselves and
start from those of the step before, see `pycomm.reduction.powersgd`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.cast import Cast
from pycomm.codecs.implementations import Implementation, implementation
from pycomm.codecs.philox import random_words
from pycomm.codecs.products import product


@dataclass(frozen=True)
class PowerSGD(Codec):
    """A matrix M [rows, columns] as P Q^T: P [rows, rank], orthonormal, and Q [columns, rank].

    The matrix is a parameter's first dimension by all others. Payload: P, then Q, in float32.
    """

    name: ClassVar[str] = "powersgd"
    combine: ClassVar[Combine] = "factors"
    wire_version: ClassVar[int] = 1

    rank: int = 4
    """Columns of the factors; more is closer and larger: 1, 2 and 4 are usual."""
    min_compression: float = 2.0
    """Parameters whose factors are not smaller by more than this factor are sent exactly."""
    rows: int = 0
    """Set by `fit`; 0: the number that makes the matrix as nearly square as integers allow."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank={self.rank} must be at least 1")
        if self.min_compression < 1:
            raise ValueError(f"powersgd: min_compression={self.min_compression} must be at least 1")

    def fit(self, shape: Sequence[int]) -> Codec:
        """Return this codec for matrices of a parameter's shape, or fp32 if it does not pay."""
        numel = math.prod(shape)
        if len(shape) < 2 or numel == 0:
            return Cast("float32")
        fitted = replace(self, rows=shape[0])
        if 4 * numel <= self.min_compression * fitted.encoded_bytes(numel):
            return Cast("float32")
        return fitted

    def shape(self, numel: int) -> tuple[int, int]:
        """Return the rows and columns of a tensor of ``numel`` values.

        Raises:
            ValueError: the rows do not divide the number of values.
        """
        rows = self.rows or next((d for d in range(math.isqrt(numel), 0, -1) if numel % d == 0), 1)
        if numel % rows:
            raise ValueError(f"powersgd: {numel} values are not a matrix of {rows} rows")
        return rows, numel // rows

    def width(self, numel: int) -> int:
        """Return the number of columns of the factors of ``numel`` values: at most the rank."""
        return min(self.rank, *self.shape(numel))

    @property
    def granule(self) -> int:
        return 0

    def encoded_bytes(self, numel: int) -> int:
        return 4 * self.width(numel) * sum(self.shape(numel)) if numel else 0

    def implementation(self, device: str) -> Implementation:
        return implementation(self.name, "reference", device)

    def start(self, numel: int, key: RandomKey, device: torch.device) -> torch.Tensor:
        """Return the first Q, float32 [columns, width]: uniform in [-1, 1), equal on all ranks."""
        columns, width = self.shape(numel)[1], self.width(numel)
        words = random_words(key, 0, columns * width, device)
        return ((words >> 8).float() * 2.0**-23 - 1).view(columns, width)

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        if not p.numel():
            return p.new_empty(0, dtype=torch.uint8)
        matrix = p.view(self.shape(p.numel()))
        left = orthonormal(product(matrix, self.start(p.numel(), key, p.device)))
        right = product(matrix.t(), left)
        return torch.cat((left.reshape(-1), right.reshape(-1))).view(torch.uint8)

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if not numel:
            return payload.new_empty(0, dtype=torch.float32)
        (rows, columns), width = self.shape(numel), self.width(numel)
        left, right = torch.split(payload.view(torch.float32), [rows * width, columns * width])
        return product(left.view(rows, width), right.view(columns, width).t()).view(-1)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span those of a matrix [n, rank], by Householder's QR.

    QR needs no threshold: a column that is zero or depends on others yields some vector that is
    orthogonal to the rest. Values that are not finite yield NaN.
    """
    if not matrix.isfinite().all():
        return torch.full_like(matrix, math.nan)
    q: torch.Tensor = torch.linalg.qr(matrix).Q
    return q
