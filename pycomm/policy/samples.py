"""Samples of reduced gradients: slices are also reduced exactly, to measure the error.

A hook calls `Checks.probe` with each bucket before it is reduced, and `BucketProbe.finish` with
the result. A few parameters take part in a check, each with a slice of its values. Two sums over
the ranks are made exactly, off the critical path:

* the average of the gradients, from which the result differs by ``error``;
* the due value: that average plus the residuals. The result's difference from it, ``coding``, is
  the codec's error alone. Error feedback converges if this stays below 1 (Karimireddy et al. 2019,
  "Error Feedback Fixes SignSGD", assumption A): a codec above 1 loses more than it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

_NUMBERS = 8  # numbers for each parameter of a check

ResidualOf = Callable[[str, int, int, int], "torch.Tensor | None"]
"""Name, begin, end, row -> float32 [end - begin]: what this rank's residuals add to the average,
which is worker / ranks + owner; None if there is no residual."""


class SampledPiece(Protocol):
    """One parameter's part of a bucket."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def offset(self) -> int:
        """Index of its first value in the bucket."""

    @property
    def numel(self) -> int:
        """Number of values."""


@dataclass(frozen=True)
class Quality:
    """Result of a check for one parameter, in L2 norms over the sampled values."""

    step: int
    """Step of the check."""
    error: float
    """|result - exact| / |exact|, where exact is the average of the gradients."""
    cosine: float
    """Cosine between result and exact."""
    coding: float
    """|result - due| / |due|: the error of the codec alone, in a whole all-reduce."""
    residual: float
    """|due - exact| / |exact|: the residuals of earlier steps."""
    spread: float = 1.0
    """Sum of |contribution|^2 of the ranks / |due|^2: 1 if contributions are independent, 1 / ranks
    if they are equal, more if they cancel."""


class BucketProbe:
    """The sampled slices of one bucket while it is reduced.

    Args:
        slices: places of the slices in the result.
        exact: float32 [rows, 2, values]: this rank's part of the gradients, and of the due values.
            The rows of a result go to as many ranks.
        group: the ranks that reduce.
        norms: for each slice, the squared norm of this rank's contribution.
    """

    def __init__(
        self,
        slices: Mapping[str, slice],
        exact: torch.Tensor,
        group: dist.ProcessGroup,
        norms: Sequence[float],
    ) -> None:
        self.names = list(slices)
        self._slices = list(slices.values())
        self._norms = torch.tensor(norms, dtype=torch.float64, device="cpu")[:, None]
        self._exact = exact
        self._row = group.rank() if len(exact) > 1 else 0
        self._work = dist.all_reduce(exact, group=group, async_op=True)
        self._result: torch.Tensor | None = None

    def finish(self, result: torch.Tensor) -> torch.Tensor:
        """Keep the slices of a reduced bucket, and return it."""
        flat = result.detach().view(-1)
        self._result = torch.cat([flat[part] for part in self._slices]).float()
        return result

    def numbers(self) -> torch.Tensor:
        """Return |result - exact|^2, |exact|^2, |result|^2, result * exact, |result - due|^2,
        |due|^2, |due - exact|^2 and the norm of each parameter: float64 [parameters, 8].

        The numbers are zeros if the bucket's reduction did not complete.
        """
        if self._work is not None:
            self._work.wait()
        if self._result is None:
            return torch.zeros(len(self.names), _NUMBERS, dtype=torch.float64, device="cpu")
        sizes = [part.stop - part.start for part in self._slices]
        e, d = self._exact[self._row].cpu().double()
        r = self._result.cpu().double()
        off, lost, residual = r - e, r - d, d - e
        pairs = ((off, off), (e, e), (r, r), (r, e), (lost, lost), (d, d), (residual, residual))
        products = torch.stack([a * b for a, b in pairs])
        sums = torch.stack([part.sum(dim=1) for part in torch.split(products, sizes, dim=1)])
        return torch.cat((sums, self._norms), dim=1)


def qualities(step: int, names: Sequence[str], numbers: Sequence[float]) -> dict[str, Quality]:
    """Return the results from the numbers of `BucketProbe.numbers`, one after the other.

    Samples that are all zeros, or that have a value that is not finite, are left out.
    """
    found = {}
    for i, name in enumerate(names):
        sums = numbers[_NUMBERS * i : _NUMBERS * (i + 1)]
        off, exact, result, product, lost, due, residual, sent = sums
        if not all(map(math.isfinite, (off, lost, residual, sent))) or not (exact > 0 and due > 0):
            continue
        found[name] = Quality(
            step=step,
            error=math.sqrt(off / exact),
            cosine=product / math.sqrt(exact * result) if result > 0 else 0.0,
            coding=math.sqrt(lost / due),
            residual=math.sqrt(residual / exact),
            spread=sent / due,
        )
    return found
