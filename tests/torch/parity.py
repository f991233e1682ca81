"""Parity with Gloo: the same function on pycomm and on Gloo must give the same bits.

A sum of two values does not depend on their order, so functions that reduce over two ranks at a
time may use any floats; those that reduce over more use small integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.torch.harness import equal
from tests.torch.pool import Pool


def same_as_gloo(pool: Pool, function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """Run a function on both backends, compare what every rank returns, and return it."""
    ours, theirs = (
        pool.run(function, *args, ranks=ranks, backend=backend) for backend in ("pycomm", "gloo")
    )
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert equal(a, b), f"rank {rank} has {a} on pycomm and {b} on Gloo"
    return ours
