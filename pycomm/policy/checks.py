"""Checks of the quality guard: their interval, their cost and their complaints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from pycomm.codecs import Codec, short_text
from pycomm.log import logger, tell
from pycomm.policy.exchange import gather
from pycomm.policy.guard import Guard
from pycomm.policy.quality import finer, nominal_error, reduced_error
from pycomm.policy.rules import Decision
from pycomm.policy.samples import BucketProbe, Quality, ResidualOf, SampledPiece, Sampler, qualities

_AGAIN = 3
"""Steps from a check to the next one of those that were above their limit."""


class Checks:
    """The checks of one plan.

    A check begins with a step, samples its buckets, and ends when the next step begins.

    Args:
        guard: options of the checks.
        group: the ranks that reduce together.
        clock: function that returns seconds since some moment.
    """

    def __init__(self, guard: Guard, group: dist.ProcessGroup, clock: Callable[[], float]) -> None:
        self.guard = guard
        self._group = group
        self._clock = clock
        self._sampler = Sampler(guard, group)
        self._suspects: set[str] = set()
        self._warned: set[str] = set()
        self._cost = 0.0  # seconds of the current check on this rank
        self._exchanged = 0.0  # seconds of the last exchange

    @property
    def every(self) -> int:
        """Steps from one check to the next."""
        return self._sampler.every

    def begin(self, step: int, decisions: Sequence[Decision]) -> Mapping[str, slice]:
        """Choose the samples of a step, if it is time for a check.

        Returns:
            What is to be sampled, by name; `probe` takes out what it has sampled.
        """
        if step % self.every == 0:
            self._sampler.choose(step, decisions, sorted(self._suspects))
        elif self._suspects and step % self.every == _AGAIN:
            self._sampler.choose(step, decisions, sorted(self._suspects), others=False)
        return self._sampler.wanted

    @property
    def are_pending(self) -> bool:
        """Whether `end` has a step to judge."""
        return bool(self._sampler.pending)

    def probe(
        self,
        values: torch.Tensor,
        pieces: Sequence[SampledPiece],
        residual_of: ResidualOf,
        *,
        rows: int,
        average: bool,
    ) -> BucketProbe | None:
        """Sample a bucket; see `Plan.probe`."""
        if not self._sampler.wanted:
            return None
        begin = self._clock()
        probe = self._sampler.probe(values, pieces, residual_of, rows=rows, average=average)
        self._cost += self._clock() - begin
        return probe

    def end(self, step: int, seconds: float, device: torch.device) -> dict[str, Quality]:
        """Return the results of a step's check, equal on all ranks; collective after a check.

        Args:
            step: step of the check.
            seconds: seconds of a step on this rank.
            device: a device whose tensors the group moves.
        """
        if not self._sampler.pending:
            return {}
        begin = self._clock()
        names, numbers = self._sampler.collect()
        cost = self._cost + self._clock() - begin
        self._cost = 0.0
        begin = self._clock()
        spent = [cost, self._exchanged, seconds]
        rows = gather([*spent, *numbers], self._group, device)
        self._exchanged = self._clock() - begin
        costs, exchanges, steps = zip(*(row[: len(spent)] for row in rows), strict=True)
        # Most of an exchange is waiting for other ranks, which the step's first bucket would do
        # anyway.
        between = self.every * max(steps)
        self._sampler.spent((max(costs) + min(exchanges)) / between if between else 0.0)
        # Sums over the ranks, of their parts of a reduce-scatter or of one all-reduce.
        totals = [sum(column) for column in zip(*rows, strict=True)][len(spent) :]
        return qualities(step, names, totals)

    def warning(self, name: str, codec: Codec, quality: Quality) -> str:
        """Return a warning if a parameter exceeds its limit for the second time in a row.

        The first parameter of each codec is logged as a warning.
        """
        expected = reduced_error(codec, quality.spread)
        limit = self.guard.limit_of(nominal_error(codec), expected)
        if quality.coding <= limit:
            self._suspects.discard(name)
            return ""
        if name not in self._suspects:
            self._suspects.add(name)
            return ""
        self._suspects.discard(name)
        spec = short_text(codec)
        what = (
            f"{name}: {spec} is off by {quality.coding:.2f} of what it should carry (at most "
            f"{limit:.2f}), the average's error is {quality.error:.2f}, cosine {quality.cosine:.2f}"
        )
        better = finer(codec) if self.guard.escalate else None
        if better is not None:
            what += f"; uses {short_text(better)} from now on"
        if self._group.rank() == 0:
            if spec not in self._warned:
                logger.warning("guard, step %d: %s", quality.step, what)
            else:
                tell(f"guard, step {quality.step}: {what}")
        self._warned.add(spec)
        return what
