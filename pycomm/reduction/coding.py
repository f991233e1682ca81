"""The schedule of coded collectives in plain Python, for codecs that C++ does not run.

What csrc/collectives/coded/two_shot.h does segment by segment happens here shot by shot, on top of
torch.distributed: cuts, random numbers, the order of sums and all results are those of C++, and
ranks may use either. Values are coded one run at a time by the codecs' tensor interface, on any
device and with any implementation; tests take it as the reference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

import torch
import torch.distributed as dist

from pycomm import feedback
from pycomm.codecs import RandomKey
from pycomm.codecs.convert import convert
from pycomm.errors import WireMismatch
from pycomm.feedback.rule import EXACT
from pycomm.reduction import payloads
from pycomm.reduction.bucket import Bucket, BucketPiece

GRAIN = 32  # kGrain of coded/layout.h
OWNER_HOP = -1
_MASK = (1 << 64) - 1


def hop_seed(seed: int, rank: int) -> int:
    """Return the seed of what `rank` sends, or of OWNER_HOP; as in coded.h."""
    z = (seed + 0x9E3779B97F4A7C15 * (rank + 2)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Run:
    """Values begin <= i < end of one piece."""

    piece: BucketPiece
    begin: int
    end: int

    @cached_property
    def is_exact(self) -> bool:
        """Its payload is its float32 values."""
        return self.piece.codec == EXACT and self.piece.residual is None

    @cached_property
    def bytes(self) -> int:
        """Bytes of the payload; the largest number, if the codec is variable."""
        return self.piece.codec.encoded_bytes(self.end - self.begin)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return this run's part of a row of the bucket."""
        return values[self.piece.offset + self.begin : self.piece.offset + self.end]


Runs = Sequence[Run]


def total_bytes(runs: Runs) -> int:
    """Return the bytes of the payloads of some runs; the most, if one of them is variable."""
    return sum(run.bytes for run in runs)


def is_variable(runs: Runs) -> bool:
    """Return whether the payloads of some runs vary in size."""
    return any(run.piece.codec.variable for run in runs)


def granule(piece: BucketPiece, grain: int = GRAIN) -> int:
    """Return the multiple at which a piece may be cut: all of it for a codec without a granule."""
    own = piece.codec.granule
    return lcm(own, grain) if own else max(1, piece.numel)


def chunks(values: Runs, ranks: int, grain: int = GRAIN) -> list[list[Run]]:
    """Split values into the runs of each owner, like `Cuts` of coded/layout.cpp.

    Args:
        values: runs of pieces in a bucket, one behind the other.
        ranks: number of owners.
        grain: cuts are at multiples of it, too.
    """
    sizes = [run.end - run.begin for run in values]
    *starts, numel = accumulate(sizes, initial=0)

    def cut(place: int) -> int:
        found = bisect_right(starts, place) - 1
        if found < 0:
            return 0
        inside = min(place - starts[found], sizes[found])
        if inside < sizes[found]:
            inside -= inside % granule(values[found].piece, grain)
        return starts[found] + inside

    cuts = [cut(numel // ranks * r + numel % ranks * r // ranks) for r in range(ranks)] + [numel]
    owned = []
    for begin, end in pairwise(cuts):
        spans = [
            (run, run.begin + max(begin, start) - start, run.begin + min(end, start + size) - start)
            for run, start, size in zip(values, starts, sizes, strict=True)
        ]
        owned.append([Run(run.piece, lo, hi) for run, lo, hi in spans if lo < hi])
    return owned


def whole(pieces: Sequence[BucketPiece]) -> list[Run]:
    """Return runs of all values of some pieces."""
    return [Run(piece, 0, piece.numel) for piece in pieces if piece.numel > 0]


def spans(pieces: Sequence[BucketPiece], runs: Runs) -> list[tuple[int, int]]:
    """Return the values of each piece that are in some runs, of which it has one or none."""
    found = {id(run.piece): (run.begin, run.end) for run in runs}
    return [found.get(id(piece), (0, 0)) for piece in pieces]


class Coder:
    """One rank's encoder and decoder in an operation.

    Float32 values of a bucket are encoded and decoded in place. Those of 16 bits are widened run by
    run and narrowed at the end.

    Args:
        rank: our number among the ranks that encode the same values.
        seed: equal on all ranks.
        step: number of the step.
    """

    def __init__(self, rank: int, *, seed: int, step: int) -> None:
        self.rank = rank
        self.seed, self.step = seed, step

    def encode(
        self, runs: Runs, values: torch.Tensor, floats: Sequence[torch.Tensor] | None, row: int = 0
    ) -> torch.Tensor:
        """Return the payloads of some runs, one behind the other (uint8 [used bytes]).

        Args:
            runs: the runs to encode.
            values: a row of the bucket.
            floats: an owner's result, as float32 of each run; None: encode a contribution, with the
                worker's residual.
            row: row of the residuals, if they have one for each owner; each row has its own random
                numbers.
        """
        worker = floats is None
        out = torch.empty(total_bytes(runs), dtype=torch.uint8, device=values.device)
        at = 0
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # a model has many biases: one call
        for i, run in enumerate(runs):
            x = run.of(values) if floats is None else floats[i]
            x = x if x.dtype == torch.float32 else convert(x, torch.float32)
            codec, payload = run.piece.codec, out[at : at + run.bytes]
            if run.is_exact:
                copies.append((payload.view(torch.float32), x))
                at += run.bytes
                continue
            seed = hop_seed(self.seed, self.rank if worker else OWNER_HOP)
            key = RandomKey(hop_seed(seed, row) if row else seed, self.step, run.piece.tensor)
            residual, begin = run.piece.residual, run.begin
            if residual is None:
                codec.encode(x, payload, key=key, index=begin)
            else:
                feedback.encode(
                    codec, x, payload, residual, worker=worker, begin=begin, row=row, key=key
                )
            at += codec.used_bytes(payload)
        if copies:
            places, floats32 = zip(*copies, strict=True)
            torch._foreach_copy_(places, floats32)
        return out[:at]

    def decode(
        self, runs: Runs, payload: torch.Tensor, floats: Sequence[torch.Tensor], *, add: bool
    ) -> None:
        """Decode payloads into the float32 values of each run, or add to these.

        Raises:
            WireMismatch: a payload states a size that is impossible.
        """
        at = 0
        exact: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run, x in zip(runs, floats, strict=True):
            codec, part = run.piece.codec, payload[at : at + run.bytes]
            used = run.bytes
            if run.is_exact:
                exact.append((x, part.view(torch.float32)))
                at += used
                continue
            if codec.variable:
                try:
                    used = codec.used_bytes(part)
                except ValueError as error:
                    raise WireMismatch(
                        f"rank {self.rank}: a payload for {run.end - run.begin} values cannot be "
                        f"read: {error}; install the same pycomm on all hosts"
                    ) from None
                padded = payload.new_zeros(run.bytes)
                padded[:used] = part[:used]
                part = padded
            (codec.decode_add if add else codec.decode)(part, x)
            at += used
        if exact:
            to, parts_of = zip(*exact, strict=True)
            (torch._foreach_add_ if add else torch._foreach_copy_)(to, parts_of)

    def add_up(
        self, runs: Runs, payloads: Sequence[torch.Tensor], values: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the float32 sums of contributions in rank order, in the row if that is float32."""
        sums = _room(runs, values)
        for r, payload in enumerate(payloads):
            self.decode(runs, payload, sums, add=r > 0)
        return sums

    def average_senders(
        self,
        runs: Runs,
        payloads: Sequence[torch.Tensor],
        values: torch.Tensor,
        counts: Sequence[float],
    ) -> list[torch.Tensor]:
        """Average each value over the ranks that have sent it, in rank order; 0 if none has."""
        means = [mean.zero_() for mean in _room(runs, values)]
        totals = [torch.zeros_like(mean) for mean in means]
        theirs = [torch.empty_like(mean) for mean in means]
        for payload, count in zip(payloads, counts, strict=True):
            self.decode(runs, payload, theirs, add=False)
            for mean, part, total in zip(means, theirs, totals, strict=True):
                mean.add_(part)
                total.add_(part != 0, alpha=count)
        for mean, total in zip(means, totals, strict=True):
            mean.div_(total.masked_fill_(total == 0, 1))
        return means


def _room(runs: Runs, values: torch.Tensor) -> list[torch.Tensor]:
    """Return a float32 buffer for each run to decode into; the contents are undefined."""
    wide = values.dtype == torch.float32
    rooms = [run.of(values) for run in runs]
    return rooms if wide else [torch.empty_like(x, dtype=torch.float32) for x in rooms]


@dataclass(frozen=True)
class ExchangePlan:
    """What an operation exchanges, as in csrc/collectives/coded/exchange.h."""

    owned: Sequence[Runs] = ()
    """The runs of each owner; empty: no value has one."""
    shown: Runs = ()
    """The runs whose payloads all ranks get, and add up."""
    rows: Sequence[int] = ()
    """Each rank owns a row of the input, with all runs, which has this number among the rows of
    the residuals, and gets its result; empty: there is one row."""
    scatters: bool = True
    """Ranks send owners what they contribute."""
    gathers: bool = True
    """Owners send all ranks the result."""

    def run(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        *,
        seed: int,
        step: int,
        divisor: int,
        found_inf: torch.Tensor,
        senders: Sequence[float] | None = None,
        encoded: Callable[[], None] | None = None,
    ) -> None:
        """Run the operation in plain Python; the arguments are those of `two_shot.exchange`."""
        rank, ranks = group.rank(), group.size()
        coder = Coder(rank, seed=seed, step=step)
        rows = list(range(ranks)) if self.rows else [0] * ranks
        contributed = input.view(rows[-1] + 1, -1)

        def store(runs: Runs, floats: Sequence[torch.Tensor], divisor: int) -> None:
            for run, x in zip(runs, floats, strict=True):
                convert(x, run.of(output), divisor=divisor, found_inf=found_inf)

        def gathered(ours: torch.Tensor, runs: Sequence[Runs]) -> list[torch.Tensor]:
            most, variable = [total_bytes(each) for each in runs], any(map(is_variable, runs))
            if encoded is not None and not (self.owned and self.scatters):
                encoded()
            came = payloads.all_gather(ours, ours.numel(), most, group, variable=variable)
            return payloads.parts(came)

        if self.owned:
            mine = self.owned[rank]
            if self.scatters:
                sent = [
                    coder.encode(runs, contributed[row], None, number)
                    for runs, row, number in zip(self.owned, rows, self.rows or rows, strict=True)
                ]
                if encoded is not None:
                    encoded()
                sizes, most = [payload.numel() for payload in sent], total_bytes(mine)
                variable = any(map(is_variable, self.owned))
                came = payloads.all_to_all(torch.cat(sent), sizes, most, group, variable=variable)
                sums = coder.add_up(mine, payloads.parts(came), output)
            if self.scatters and self.gathers:
                averages = [convert(x, divisor=divisor) for x in sums]
                ours = coder.encode(mine, output, averages)
            elif self.gathers:
                ours = coder.encode(mine, contributed[0], None)
            else:
                store(mine, sums, divisor)
            if self.gathers:
                for runs, payload in zip(self.owned, gathered(ours, self.owned), strict=True):
                    floats = _room(runs, output)
                    coder.decode(runs, payload, floats, add=False)
                    store(runs, floats, 1)
        if self.shown:
            ours = coder.encode(self.shown, contributed[0], None)
            shown = gathered(ours, [self.shown] * ranks)
            if senders is None:
                store(self.shown, coder.add_up(self.shown, shown, output), divisor)
            else:
                means = coder.average_senders(self.shown, shown, output, senders)
                store(self.shown, means, 1)


def all_reduce_plan(values: Runs, ranks: int) -> ExchangePlan:
    """Return the plan of an all-reduce of some values among so many owners."""
    dense = [run for run in values if run.piece.codec.combine != "gather"]
    shown = [run for run in values if run.piece.codec.combine == "gather"]
    return ExchangePlan(chunks(dense, ranks) if dense else (), shown)


def rows_plan(pieces: Sequence[BucketPiece], numbers: Sequence[int]) -> ExchangePlan:
    """Return the plan of a reduce-scatter of rows with these numbers."""
    return ExchangePlan([whole(pieces)] * len(numbers), (), numbers, gathers=False)
