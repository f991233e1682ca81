"""Model of what is trained: the buckets of its gradients, in the order in which DDP sends them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from pycomm import units

FIRST_BUCKET = 1 << 20
"""Bytes of DDP's first bucket, which is sent when backward has just begun."""
BUCKET = 25 << 20
"""Bytes of the other buckets: DDP's bucket_cap_mb."""


@dataclass(frozen=True)
class ModelBucket:
    """Gradients that are all-reduced together."""

    values: int
    exact: int = 0
    """Values in norms, biases and other tensors of one dimension, which are not compressed."""


@dataclass(frozen=True)
class Model:
    """Buckets, and the time of a step of one rank alone."""

    name: str
    buckets: tuple[ModelBucket, ...]
    compute: float
    """Seconds of forward, backward and optimizer."""
    backward: float = 0.6
    """Share of backward in `compute`; buckets become ready one after the other during it."""
    forward: float = 0.3
    """Share of forward; the rest is the optimizer's, which waits for all gradients."""
    value_bytes: int = 4
    """Bytes of an uncompressed gradient: 4, or 2 for bf16."""

    @cached_property
    def values(self) -> int:
        return sum(bucket.values for bucket in self.buckets)

    @cached_property
    def runs(self) -> tuple[tuple[ModelBucket, int], ...]:
        """Buckets, with the number of equal ones in each run."""
        return tuple((bucket, len(list(same))) for bucket, same in groupby(self.buckets))


def of_count(count: int, compute: float, **options: Any) -> Model:
    """Return a model of which only the number of parameters is known: its buckets are full.

    Args:
        count: number of parameters.
        compute: seconds of a step of one rank alone.
        options: fields of :class:`Model`.
    """
    value_bytes = options.get("value_bytes", 4)
    buckets, left, size = [], count, FIRST_BUCKET
    while left > 0:
        values = min(left, size // value_bytes)
        buckets.append(ModelBucket(values))
        left, size = left - values, BUCKET
    return Model(f"{units.format_count(count)} parameters", tuple(buckets), compute, **options)


def of_tensors(
    shapes: Iterable[tuple[int, ...]],
    compute: float,
    *,
    name: str = "model",
    bucket_mb: float | None = None,
    **options: Any,
) -> Model:
    """Return a model of known parameters, in the order of `module.parameters()`.

    DDP adds them to buckets from the last to the first, and closes a bucket once it is full.
    """
    value_bytes = options.get("value_bytes", 4)
    size = None if bucket_mb is None else int(bucket_mb * 2**20)
    limit, cap = (FIRST_BUCKET, BUCKET) if size is None else (size, size)
    buckets: list[ModelBucket] = []
    values = exact = 0
    for shape in reversed(list(shapes)):
        numel = math.prod(shape)
        values += numel
        exact += numel if len(shape) < 2 else 0
        if values * value_bytes >= limit:
            buckets.append(ModelBucket(values, exact))
            values, exact, limit = 0, 0, cap
    if values:
        buckets.append(ModelBucket(values, exact))
    if not buckets:
        raise ValueError(f"{name} has no parameters: want a module that can be trained")
    return Model(name, tuple(buckets), compute, **options)
