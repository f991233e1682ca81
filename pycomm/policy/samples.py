"""Samples of what was reduced, also reduced exactly: how far off is the compressed average?

A hook calls `Sampler.probe` with each bucket before it is reduced, and `Probe.finish` with the
result. A few parameters take part in a check, each with a slice of its values. Two things are
summed over the ranks exactly, off the critical path:

* the average of the gradients, from which the result differs by ``error``;
* what was due: that average and what residuals owed. The result's difference from it, ``coding``,
  is the codec's alone. Error feedback converges where it stays below 1 (Karimireddy et al. 2019,
  "Error Feedback Fixes SignSGD", assumption A): a codec above it loses more than it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.policy.guard import Guard
from pycomm.policy.rules import Decision

_MOST = 1 << 16  # values in one check
_LEAST = 256
_NUMBERS = 9  # of a parameter, in a check
_RAREST = 1 << 12  # steps between two checks, at most
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive multiples spread over any range

Owed = Callable[[str, int, int, int], "torch.Tensor | None"]
"""Name, begin, end, row -> float32 [end - begin]: what this rank's residuals add to the average,
which is worker / ranks + owner; None where there is no residual."""


class Piece(Protocol):
    """One parameter's part of a bucket."""

    @property
    def name(self) -> str:
        """Of the parameter."""

    @property
    def offset(self) -> int:
        """Of its first value in the bucket."""

    @property
    def numel(self) -> int:
        """Number of values."""


@dataclass(frozen=True)
class Quality:
    """What a check has found for one parameter, in L2 norms over the sampled values."""

    step: int
    """When."""
    error: float
    """|result - exact| / |exact|, where exact is the average of the gradients."""
    cosine: float
    """Between result and exact."""
    coding: float
    """|result - due| / |due|: of the codec alone."""
    residual: float
    """|due - exact| / |exact|: what was owed from earlier steps."""
    sampled: int = 0
    """Values of all ranks that were looked at."""
    saturated: int = 0
    """Those that their codec cuts off on the way to the owner; see `Codec.saturated`."""


class Probe:
    """The sampled slices of one bucket, on their way.

    Args:
        slices: where they lie in the result.
        exact: float32 [rows, 2, values]: this rank's part of the gradients, and of what is due. A
            result of several rows goes to as many ranks.
        group: whose ranks.
        counts: of each slice, this rank's values and how many of them its codec cuts off.
    """

    def __init__(
        self,
        slices: Mapping[str, slice],
        exact: torch.Tensor,
        group: dist.ProcessGroup,
        counts: Sequence[tuple[int, int]],
    ) -> None:
        self.names = list(slices)
        self._slices = list(slices.values())
        self._counts = torch.tensor(counts, dtype=torch.float64)
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
        |due|^2, |due - exact|^2 and the two counts of each parameter: float64 [parameters, 9].

        Zeros, if the bucket's reduction has not come to an end.
        """
        if self._work is not None:
            self._work.wait()
        if self._result is None:
            return torch.zeros(len(self.names), _NUMBERS, dtype=torch.float64)
        sizes = [part.stop - part.start for part in self._slices]
        e, d = self._exact[self._row].cpu().double()
        r = self._result.cpu().double()
        off, lost, owed = r - e, r - d, d - e
        pairs = ((off, off), (e, e), (r, r), (r, e), (lost, lost), (d, d), (owed, owed))
        products = torch.stack([a * b for a, b in pairs])
        sums = torch.stack([part.sum(dim=1) for part in torch.split(products, sizes, dim=1)])
        return torch.cat((sums, self._counts), dim=1)


class Sampler:
    """Chooses what takes part in each check, so that all parameters do in turn.

    Args:
        guard: how much and how often.
        group: the ranks that reduce together.
    """

    def __init__(self, guard: Guard, group: dist.ProcessGroup) -> None:
        self.guard = guard
        self.every = guard.every
        """Steps between checks; grows where checks cost too much."""
        self.wanted: dict[str, slice] = {}
        """What takes part in the current check: values of each parameter."""
        self._codecs: dict[str, Codec] = {}  # of those
        self._group = group
        self._next = 0
        self._probes: list[Probe] = []

    def choose(self, step: int, decisions: Sequence[Decision], first: Iterable[str] = ()) -> None:
        """Begin a check; all ranks choose alike.

        Args:
            step: the current one.
            decisions: of all parameters. Those that are exact have nothing to be checked.
            first: names that take part before others have their turn.
        """
        lossy = {d.parameter.name: d.parameter.numel for d in decisions if not d.exact}
        names = list(lossy)
        chosen = [name for name in first if name in lossy][: self.guard.parameters]
        for _ in names:
            if len(chosen) == self.guard.parameters:
                break
            name = names[self._next % len(names)]
            self._next += 1
            if name not in chosen:
                chosen.append(name)
        self.wanted = {}
        if not chosen:
            return
        # Two float32 sums per value travel, so that is what bounds the bytes.
        payload = sum(d.encoded_bytes for d in decisions)
        values = int(self.guard.share * self.guard.every * payload / 8)
        each = max(_LEAST, min(values, _MOST)) // len(chosen)
        for i, name in enumerate(chosen):
            count = min(max(each, 1), lossy[name])
            begin = (step + i) * _STEP % 2**64 * (lossy[name] - count + 1) >> 64
            self.wanted[name] = slice(begin, begin + count)
        self._codecs = {d.parameter.name: d.codec for d in decisions if d.parameter.name in chosen}

    def probe(
        self,
        values: torch.Tensor,
        pieces: Iterable[Piece],
        owed: Owed,
        *,
        rows: int = 1,
        average: bool = True,
    ) -> Probe | None:
        """Start the exact sums of what is wanted of one bucket; None if nothing is.

        Args:
            values: the bucket before it is reduced, any float dtype; copied.
            pieces: what lies where, in a row.
            owed: see `Owed`.
            rows: of a reduce-scatter, one for each rank; 1 for an all-reduce.
            average: whether the result is the average; else it is the sum.
        """
        slices: dict[str, slice] = {}
        gradients, debts, counts = [], [], []
        ranks = self._group.size()
        table = values.detach().view(rows, -1)
        for piece in pieces:
            part = self.wanted.pop(piece.name, None)
            if part is None or piece.numel == 0:
                continue
            # Chosen for a whole parameter, of which a row may have a part only.
            count = min(max((part.stop - part.start) // rows, 1), piece.numel)
            begin = part.start % (piece.numel - count + 1)
            here = slice(piece.offset + begin, piece.offset + begin + count)
            slices[piece.name] = here
            mine = table[:, here].float() / (ranks if average else 1)
            known = [owed(piece.name, begin, begin + count, row) for row in range(rows)]
            debt = [torch.zeros_like(mine[0]) if one is None else one for one in known]
            gradients.append(mine)
            debts.append(mine + torch.stack(debt) * (1 if average else ranks))
            # Blocks need not begin where they do in the payload: this is a sample.
            sent = debts[-1] * (ranks if average else 1)
            cut = sum(self._codecs[piece.name].saturated(row) for row in sent)
            counts.append((sent.numel(), cut))
        if not slices:
            return None
        exact = torch.stack((torch.cat(gradients, dim=1), torch.cat(debts, dim=1)), dim=1)
        probe = Probe(slices, exact, self._group, counts)
        self._probes.append(probe)
        return probe

    def spent(self, share: float) -> None:
        """Take the part of the time that checks take; they become rarer, or as frequent again."""
        if share > self.guard.share:
            self.every = min(2 * self.every, max(_RAREST, self.guard.every))
        elif share < self.guard.share / 4:
            self.every = max(self.every // 2, self.guard.every)

    @property
    def pending(self) -> bool:
        """Whether a check has to be collected; the same on all ranks."""
        return bool(self._probes)

    def collect(self) -> tuple[list[str], list[float]]:
        """End a check; return its parameters and this rank's numbers, nine for each."""
        probes, self._probes = self._probes, []
        names = [name for probe in probes for name in probe.names]
        return names, torch.cat([probe.numbers() for probe in probes]).view(-1).tolist()


def qualities(step: int, names: Sequence[str], numbers: Sequence[float]) -> dict[str, Quality]:
    """Return what the numbers of `Sampler.collect` say; without those that say nothing.

    A sample of zeros, or with a value that is not finite, says nothing.
    """
    found = {}
    for i, name in enumerate(names):
        sums = numbers[_NUMBERS * i : _NUMBERS * (i + 1)]
        off, exact, result, product, lost, due, owed, sampled, saturated = sums
        if not all(map(math.isfinite, (off, lost, owed))) or not (exact > 0 and due > 0):
            continue
        found[name] = Quality(
            step=step,
            error=math.sqrt(off / exact),
            cosine=product / math.sqrt(exact * result) if result > 0 else 0.0,
            coding=math.sqrt(lost / due),
            residual=math.sqrt(owed / exact),
            sampled=int(sampled),
            saturated=int(saturated),
        )
    return found
