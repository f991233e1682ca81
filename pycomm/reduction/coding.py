"""Coding of buckets in Python, where C++ does not: cut, encode, decode.

Cuts, random numbers and the order of sums are those of csrc/collectives/coded/layout.h and
coded/coder.h; values are coded by the codecs' tensor interface.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

import torch

from pycomm import feedback
from pycomm.codecs import RandomKey
from pycomm.codecs.convert import convert
from pycomm.errors import WireMismatch
from pycomm.feedback.rule import EXACT
from pycomm.reduction.bucket import BucketPiece

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
    def bytes(self) -> int:
        """Bytes of the payload; the largest number, if the codec is variable."""
        return self.piece.codec.encoded_bytes(self.end - self.begin)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return this run's part of a bucket."""
        return values[self.piece.offset + self.begin : self.piece.offset + self.end]


def total_bytes(runs: Sequence[Run]) -> int:
    """Return the bytes of the payloads of some runs; the most, if one of them is variable."""
    return sum(run.bytes for run in runs)


def is_variable(runs: Sequence[Run]) -> bool:
    """Return whether the payloads of some runs vary in size."""
    return any(run.piece.codec.variable for run in runs)


def granule(piece: BucketPiece, grain: int = GRAIN) -> int:
    """Return the multiple at which a piece may be cut: all of it for a codec without a granule."""
    own = piece.codec.granule
    return lcm(own, grain) if own else max(1, piece.numel)


def chunks(values: Sequence[Run], ranks: int, grain: int = GRAIN) -> list[list[Run]]:
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


class Packed:
    """The runs of a chunk, with all exact ones joined into one behind the others.

    A model has hundreds of norms and biases, and each run costs a dozen calls, whatever its size.
    The payload is the same as if the runs were coded one by one.

    Args:
        runs: runs of pieces in a bucket.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        plain = [run for run in runs if run.piece.codec == EXACT and run.piece.residual is None]
        self._plain = plain if len(plain) > 1 else []
        taken = set(map(id, self._plain))
        self._others = [run for run in runs if id(run) not in taken]
        self._sizes = [run.end - run.begin for run in self._plain]
        self.runs = list(self._others)
        """The runs to code, with the exact ones joined."""
        self.order = [*self._others, *self._plain]
        """The single runs in the same order, to code one by one: the bytes are the same."""
        begin = runs[0].piece.offset + runs[0].begin if runs else 0
        end = runs[-1].piece.offset + runs[-1].end if runs else 0
        whole = sum(run.end - run.begin for run in runs) == end - begin
        self._span = slice(begin, end) if whole else None  # all values, if they have no gaps
        if self._plain:
            piece = BucketPiece("", 0, sum(self._sizes), EXACT, 0, None)
            self.runs.append(Run(piece, 0, piece.numel))

    def widened(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the float32 values of each run to code."""
        yield from widened(self._others, values)
        if self._plain:
            parts = torch.cat([run.of(values) for run in self._plain])
            yield parts if parts.dtype == torch.float32 else convert(parts, torch.float32)

    def float32_view(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return float32 buffers to decode into; their contents are undefined."""
        parts = float32_view(self._others, values)
        if self._plain:
            parts.append(torch.empty(sum(self._sizes), device=values.device, dtype=torch.float32))
        return parts

    def average(self, sums: Sequence[torch.Tensor], values: torch.Tensor, ranks: int) -> None:
        """Divide the sums that an owner codes again; they are where `float32_view` put them."""
        if values.dtype == torch.float32 and self._span is not None:
            convert(values[self._span], divisor=ranks)  # in one call
            sums = sums[len(self._others) :]
        for part in sums:
            convert(part, divisor=ranks)

    def finish(
        self,
        parts: Sequence[torch.Tensor],
        values: torch.Tensor,
        found_inf: torch.Tensor,
    ) -> None:
        """Write the decoded values to the bucket; set the flag on Inf and NaN."""
        others = len(self._others)
        places = [run.of(values) for run in self._plain]
        if values.dtype == torch.float32 and self._span is not None:
            if places:
                torch._foreach_copy_(places, list(torch.split(parts[-1], self._sizes)))
            convert(values[self._span], found_inf=found_inf)
            return
        finish(self._others, parts[:others], values, 1, found_inf)
        if self._plain:
            result = torch.empty_like(parts[-1], dtype=values.dtype)
            convert(parts[-1], result, found_inf=found_inf)
            torch._foreach_copy_(places, list(torch.split(result, self._sizes)))


class Coder:
    """One rank's encoder and decoder in an operation.

    Args:
        rank: our number among the ranks that encode the same values.
        seed: equal on all ranks.
        step: number of the step.
    """

    def __init__(self, rank: int, *, seed: int, step: int) -> None:
        self.rank = rank
        self.seed, self.step = seed, step

    def encode(
        self,
        runs: Sequence[Run],
        values: Iterable[torch.Tensor],
        device: torch.device,
        *,
        worker: bool,
        row: int = 0,
    ) -> torch.Tensor:
        """Return the payloads of some runs, one behind the other (uint8 [used bytes]).

        Args:
            runs: the runs to encode.
            values: float32 values of each run; see `widened`.
            device: device of the values.
            worker: encode a contribution, with the worker's residual; else an owner's result.
            row: row of the residuals, if they have one for each owner; each row has its own random
                numbers.
        """
        out = torch.empty(total_bytes(runs), dtype=torch.uint8, device=device)
        at = 0
        for run, floats in zip(runs, values, strict=True):
            codec, payload = run.piece.codec, out[at : at + run.bytes]
            key, residual = self._key(run.piece, worker, row), run.piece.residual
            if residual is None:
                codec.encode(floats, payload, key=key, index=run.begin)
            else:
                feedback.encode(
                    codec,
                    floats,
                    payload,
                    residual,
                    worker=worker,
                    begin=run.begin,
                    row=row,
                    key=key,
                )
            at += codec.used_bytes(payload)
        return out[:at]

    def decode(
        self,
        runs: Sequence[Run],
        payload: torch.Tensor,
        values: Sequence[torch.Tensor],
        *,
        add: bool,
    ) -> None:
        """Decode payloads into the float32 values of each run, or add to these.

        Raises:
            WireMismatch: a payload states a size that is impossible.
        """
        at = 0
        for run, floats in zip(runs, values, strict=True):
            codec, part = run.piece.codec, payload[at : at + run.bytes]
            used = run.bytes
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
            (codec.decode_add if add else codec.decode)(part, floats)
            at += used

    def _key(self, piece: BucketPiece, worker: bool, row: int) -> RandomKey:
        seed = hop_seed(self.seed, self.rank if worker else OWNER_HOP)
        if row > 0:
            seed = hop_seed(seed, row)
        return RandomKey(seed, self.step, piece.tensor)


# Float32 values of a bucket are encoded and decoded in place. The runs of a 16-bit bucket are
# widened one at a time and narrowed at the end, so there is no float32 copy of the bucket.


def widened(runs: Sequence[Run], values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the float32 values of each run of a bucket."""
    for run in runs:
        part = run.of(values)
        yield part if part.dtype == torch.float32 else convert(part, torch.float32)


def float32_view(runs: Sequence[Run], values: torch.Tensor) -> list[torch.Tensor]:
    """Return a float32 buffer for each run to decode into; the contents are undefined."""
    parts = [run.of(values) for run in runs]
    return [
        p if p.dtype == torch.float32 else torch.empty_like(p, dtype=torch.float32) for p in parts
    ]


def finish(
    runs: Sequence[Run],
    parts: Sequence[torch.Tensor],
    values: torch.Tensor,
    divisor: int,
    found_inf: torch.Tensor,
) -> None:
    """Divide the decoded values and write them to the bucket; set the flag on Inf and NaN."""
    for run, part in zip(runs, parts, strict=True):
        convert(part, run.of(values), divisor=divisor, found_inf=found_inf)
