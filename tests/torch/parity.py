"""Parity with Gloo: the same function on pycomm and on Gloo must give the same bits.

A sum of two values does not depend on their order, so functions that reduce over two ranks at a
time may use any floats; those that reduce over more use small integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.torch.pool import Pool

WIDTH = 16


def network(layers: int = 2) -> nn.Sequential:
    """A small perceptron, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )
    )


def inputs(rank: int, step: int, rows: int = 8) -> torch.Tensor:
    """Return a rank's own batch, of shape [rows, WIDTH]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator)


def equal(a: Any, b: Any) -> bool:
    """Return whether two trees of tensors and plain values are the same, to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def same_as_gloo(pool: Pool, function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """Run a function on both backends, compare what every rank returns, and return it."""
    ours, theirs = (
        pool.run(function, *args, ranks=ranks, backend=backend) for backend in ("pycomm", "gloo")
    )
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert equal(a, b), f"rank {rank} has {a} on pycomm and {b} on Gloo"
    return ours
