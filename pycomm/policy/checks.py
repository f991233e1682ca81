"""Checks of the quality guard: their samples, their interval, their cost and their complaints.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pycomm.codecs import Codec, short_text
from pycomm.log import logger, tell
from pycomm.policy.exchange import gather_in_mesh
from pycomm.policy.quality import finer, nominal_error, reduced_error
from pycomm.policy.rules import Decision, Guard

_AGAIN = 3
"""Steps from a check to the next one of those that were above their limit."""
_MOST = 1 << 16  # largest number of values in one check
_LEAST = 256
_LONGEST = 4096  # largest number of values of a block that is sampled as a whole
_RAREST = 1 << 12  # largest number of steps between two checks
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive multiples spread over any range
_NUMBERS = 8  # numbers for each parameter of a check

ResidualOf = Callable[[str, int, int, int], "torch.Tensor | None"]
"""Name, begin, end, row -> float32 [end - begin]: what this rank's residuals add to the average,
which is worker / ranks + owner; None if there is no residual."""


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


class Checks:
    """The checks of one plan, in which all parameters take turns.

    A check begins with a step, samples its buckets, and ends when the next step begins.

    Args:
        guard: options of the checks.
        groups: as of `Plan`.
        clock: function that returns seconds since some moment.
    """

    def __init__(
        self, guard: Guard, groups: Sequence[dist.ProcessGroup], clock: Callable[[], float]
    ) -> None:
        self.guard = guard
        self.every = guard.every
        """Steps between checks; grows if checks cost too much."""
        self.wanted: dict[str, slice] = {}
        """The slice of each parameter in the current check; `probe` takes out what it samples."""
        self._groups, self._group = groups, groups[-1]
        self._clock = clock
        self._codecs: dict[str, Codec] = {}  # codecs of the parameters in the check
        self._next = 0
        self._probes: list[BucketProbe] = []
        self._suspects: set[str] = set()
        self._warned: set[str] = set()
        self._cost = 0.0  # seconds of the current check on this rank
        self._exchanged = 0.0  # seconds of the last exchange

    def begin(self, step: int, decisions: Sequence[Decision]) -> Mapping[str, slice]:
        """Choose the samples of a step, if it is time for a check; return `wanted`."""
        if step % self.every == 0:
            self.choose(step, decisions, sorted(self._suspects))
        elif self._suspects and step % self.every == _AGAIN:
            self.choose(step, decisions, sorted(self._suspects), others=False)
        return self.wanted

    @property
    def are_pending(self) -> bool:
        """Whether `end` has a step to judge; the same on all ranks."""
        return bool(self._probes)

    def choose(
        self,
        step: int,
        decisions: Sequence[Decision],
        first: Iterable[str] = (),
        *,
        others: bool = True,
    ) -> None:
        """Begin a check; all ranks choose alike.

        Args:
            step: number of the current step.
            decisions: decisions for all parameters; exact ones are not checked.
            first: names that take part before the others.
            others: the others take part, too.
        """
        lossy = {d.parameter.name: d for d in decisions if not d.exact}
        # Two float32 sums travel for each value, which bounds the number of values.
        payload = sum(d.encoded_bytes for d in decisions)
        values = int(self.guard.share * self.guard.every * payload / 8)
        values = max(_LEAST, min(values, _MOST))
        chosen = self._chosen(lossy, first, values, others)
        self.wanted = {}
        for i, name in enumerate(chosen):
            # Slices are whole blocks, since a part of a block may have little of its error.
            unit, numel = _unit(lossy[name].codec), lossy[name].parameter.numel
            count = max(values // len(chosen) // unit, -(-_needed(lossy[name]) // unit))
            count = min(count, -(-numel // unit))
            block = (step + i) * _STEP % 2**64 * (-(-numel // unit) - count + 1) >> 64
            self.wanted[name] = slice(unit * block, min(unit * (block + count), numel))
        self._codecs = {name: lossy[name].codec for name in chosen}

    def _chosen(
        self, lossy: Mapping[str, Decision], first: Iterable[str], values: int, others: bool
    ) -> list[str]:
        """Return the names in a check: as many as it has enough values for, at least one."""
        names = list(lossy)
        chosen = [name for name in first if name in lossy][: self.guard.parameters]
        room = values - sum(_needed(lossy[name]) for name in chosen)
        for _ in names if others else ():
            name = names[self._next % len(names)]
            if name not in chosen:
                room -= _needed(lossy[name])
                if len(chosen) == self.guard.parameters or (chosen and room < 0):
                    break
                chosen.append(name)
            self._next += 1
        return chosen

    def probe(
        self,
        values: torch.Tensor,
        pieces: Iterable[Any],
        residual_of: ResidualOf,
        *,
        rows: int = 1,
        average: bool = True,
    ) -> BucketProbe | None:
        """Start the exact sums of a bucket's slices before it is reduced; all ranks call it.

        Args:
            values: the bucket's gradients, any float dtype; copied.
            pieces: layout of a row: the name, offset and numel of each parameter.
            residual_of: function that returns what this rank's residuals add to the average.
            rows: one for each rank for a reduce-scatter; 1 for an all-reduce.
            average: whether the result is the average; else it is the sum.

        Returns:
            None, or a probe whose ``finish`` takes the result, before the next step.
        """
        if not self.wanted:
            return None
        begin = self._clock()
        slices: dict[str, slice] = {}
        gradients, due, norms = [], [], []
        ranks = self._group.size()
        table = values.detach().view(rows, -1)
        for piece in pieces:
            part = self.wanted.pop(piece.name, None)
            if part is None or piece.numel == 0:
                continue
            # The slice was chosen for a whole parameter, but a row may have only a part of it.
            unit = _unit(self._codecs[piece.name])
            count = min(-(-(part.stop - part.start) // (rows * unit)) * unit, piece.numel)
            first = part.start % (piece.numel - count + 1) // unit * unit
            here = slice(piece.offset + first, piece.offset + first + count)
            slices[piece.name] = here
            mine = table[:, here].float() / (ranks if average else 1)
            known = [residual_of(piece.name, first, first + count, row) for row in range(rows)]
            residual = [torch.zeros_like(mine[0]) if one is None else one for one in known]
            gradients.append(mine)
            due.append(mine + torch.stack(residual) * (1 if average else ranks))
            # The rows of a reduce-scatter count once each; the row of an all-reduce counts on every
            # rank.
            norms.append(float(due[-1].double().square().sum()) * (ranks if rows == 1 else 1))
        if not slices:
            return None
        exact = torch.stack((torch.cat(gradients, dim=1), torch.cat(due, dim=1)), dim=1)
        probe = BucketProbe(slices, exact, self._group, norms)
        self._probes.append(probe)
        self._cost += self._clock() - begin
        return probe

    def end(self, step: int, seconds: float, device: torch.device) -> dict[str, Quality]:
        """Return the results of a step's check, equal on all ranks; collective after a check.

        Args:
            step: step of the check.
            seconds: seconds of a step on this rank.
            device: a device whose tensors the group moves.
        """
        if not self._probes:
            return {}
        begin = self._clock()
        probes, self._probes = self._probes, []
        names = [name for probe in probes for name in probe.names]
        numbers = torch.cat([probe.numbers() for probe in probes]).view(-1).tolist()
        cost = self._cost + self._clock() - begin
        self._cost = 0.0
        begin = self._clock()
        spent = [cost, self._exchanged, seconds]
        rows = gather_in_mesh([*spent, *numbers], self._groups, device)
        self._exchanged = self._clock() - begin
        costs, exchanges, steps = zip(*(row[: len(spent)] for row in rows), strict=True)
        # Most of an exchange is waiting for other ranks, which the step's first bucket would do
        # anyway.
        between = self.every * max(steps)
        self.spent((max(costs) + min(exchanges)) / between if between else 0.0)
        # Sums over the ranks, of their parts of a reduce-scatter or of one all-reduce.
        totals = [sum(column) for column in zip(*rows, strict=True)][len(spent) :]
        return qualities(step, names, totals)

    def spent(self, share: float) -> None:
        """Adapt the interval to the fraction of time that checks take."""
        if share > self.guard.share:
            self.every = min(2 * self.every, max(_RAREST, self.guard.every))
        elif share < self.guard.share / 4:
            self.every = max(self.every // 2, self.guard.every)

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


def _unit(codec: Codec) -> int:
    """Return the number of values in a block, the unit of slices; 1 for codecs without blocks."""
    return codec.granule if 1 <= codec.granule <= _LONGEST else 1


def _needed(decision: Decision) -> int:
    """Return the fewest values of a parameter whose error is meaningful, in whole blocks."""
    unit, least = _unit(decision.codec), min(_LEAST, decision.parameter.numel)
    return min(-(-least // unit) * unit, decision.parameter.numel)
