"""What a rank does to the values of a bucket where no C++ does it: cut, encode, decode.

The same cuts, random numbers and order of sums as in csrc/collectives/coded_layout.h and
coded_coder.h, on the codecs' tensor interface.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

import torch
import torch.distributed as dist

from pycomm import feedback
from pycomm.codecs import RandomKey
from pycomm.codecs.convert import convert
from pycomm.errors import WireMismatch
from pycomm.hooks.bucket import Piece

GRAIN = 32  # kGrain of coded_layout.h
OWNER_HOP, SHARED_HOP = -1, -2
_MASK = (1 << 64) - 1


def hop_seed(seed: int, rank: int) -> int:
    """Seed of what `rank` sends, or of one of the hops above; as in coded.h."""
    z = (seed + 0x9E3779B97F4A7C15 * (rank + 2)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Run:
    """Values begin <= i < end of one piece."""

    piece: Piece
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Of its payload; the most, if the codec is variable."""
        return self.piece.codec.encoded_bytes(self.end - self.begin)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This run's part of a bucket."""
        return values[self.piece.offset + self.begin : self.piece.offset + self.end]


def total_bytes(runs: Sequence[Run]) -> int:
    """Of the payloads of some runs; the most, if one of them is variable."""
    return sum(run.bytes for run in runs)


def is_variable(runs: Sequence[Run]) -> bool:
    """Return whether the payloads of some runs vary in size."""
    return any(run.piece.codec.variable for run in runs)


def granule(piece: Piece) -> int:
    """Return where a piece may be cut; a codec without a granule takes it whole."""
    own = piece.codec.granule
    return lcm(own, GRAIN) if own else max(1, piece.numel)


def chunks(pieces: Sequence[Piece], ranks: int) -> list[list[Run]]:
    """Deal pieces out to their owners: `Layout` of coded_layout.h."""
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + piece.numel)
    numel = starts.pop()

    def cut(place: int) -> int:
        found = bisect_right(starts, place) - 1
        if found < 0:
            return 0
        piece = pieces[found]
        inside = min(place - starts[found], piece.numel)
        if inside < piece.numel:
            inside -= inside % granule(piece)
        return starts[found] + inside

    cuts = [cut(numel // ranks * r + numel % ranks * r // ranks) for r in range(ranks)] + [numel]
    owned = []
    for begin, end in pairwise(cuts):
        spans = [
            (p, max(begin, start) - start, min(end, start + p.numel) - start)
            for p, start in zip(pieces, starts, strict=True)
        ]
        owned.append([Run(p, lo, hi) for p, lo, hi in spans if lo < hi])
    return owned


def whole(pieces: Sequence[Piece]) -> list[Run]:
    """All values of some pieces."""
    return [run for runs in chunks(pieces, 1) for run in runs]


class Coder:
    """What one rank of an operation does to values.

    Args:
        rank: our number among those that encode the same values.
        ranks: how many they are.
        seed: equal on all ranks.
        step: number of the step.
        agreed: what `agree` returned; None: each rank is alone with its values.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        seed: int,
        step: int,
        agreed: dict[tuple[int, int], torch.Tensor] | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.seed, self.step = seed, step
        self.agreed = agreed

    def encode(
        self,
        runs: Sequence[Run],
        values: Iterable[torch.Tensor],
        device: torch.device,
        *,
        worker: bool,
        row: int = 0,
    ) -> torch.Tensor:
        """Return the payloads of some runs, one behind the other (uint8 [bytes that are used]).

        Args:
            runs: what to encode.
            values: float32 of each run; see `widened`.
            device: where they are.
            worker: as a contribution, with the worker's residual; else as an owner's result.
            row: of the residuals, where they have one for each owner; each has random numbers of
                its own.
        """
        out = torch.empty(total_bytes(runs), dtype=torch.uint8, device=device)
        at = 0
        for run, floats in zip(runs, values, strict=True):
            codec, payload = run.piece.codec, out[at : at + run.bytes]
            agreed = None
            if codec.agrees and self.agreed is not None and (worker or codec.combine == "sum"):
                numbers = self.agreed[run.piece.offset, row]
                first = run.begin // codec.granule if codec.granule else 0
                agreed = numbers[first : first + codec.granules(run.end - run.begin)]
            key, residual = self._key(run.piece, worker, row), run.piece.residual
            # What an owner adds to a sum of the codec's own kind must not be lost: it has no error.
            if residual is None or not (worker or codec.combine != "sum"):
                codec.encode(
                    floats,
                    payload,
                    key=key,
                    index=run.begin,
                    agreed=agreed,
                    summed=not worker and codec.combine == "sum",
                )
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
                    agreed=agreed,
                )
            at += _used(payload) if codec.variable else run.bytes
        return out[:at]

    def decode(
        self,
        runs: Sequence[Run],
        payload: torch.Tensor,
        values: Sequence[torch.Tensor],
        *,
        add: bool,
    ) -> None:
        """Write the values of some runs, float32 of each, or add to them.

        Raises:
            WireMismatch: a payload's own words about its size cannot be true.
        """
        at = 0
        for run, floats in zip(runs, values, strict=True):
            codec, part = run.piece.codec, payload[at : at + run.bytes]
            used = run.bytes
            if codec.variable:
                used = _used(part) if part.numel() >= 4 else 0
                if not 0 < used <= part.numel() or used % 4:
                    raise WireMismatch(
                        f"a payload of {codec.spec()} for {run.end - run.begin} values says that "
                        f"it has {used} bytes; it may have {part.numel()}"
                    )
                padded = payload.new_zeros(run.bytes)
                padded[:used] = part[:used]
                part = padded
            (codec.decode_add if add else codec.decode)(part, floats)
            at += used

    def _key(self, piece: Piece, worker: bool, row: int) -> RandomKey:
        codec, rank, ranks = piece.codec, self.rank, self.ranks
        if worker:
            hop = SHARED_HOP if codec.shared_seed else self.rank
        elif codec.combine == "sum":
            hop, rank = SHARED_HOP, 0
        else:
            hop, rank, ranks = OWNER_HOP, 0, 1
        seed = hop_seed(self.seed, hop)
        if row > 0:
            seed = hop_seed(seed, row)
        return RandomKey(seed, self.step, piece.tensor, rank, ranks)


# Float32 values of a bucket are encoded and decoded where they lie. Of a bucket of 16 bits each run
# is widened when its turn comes and narrowed in the end, so there is no float32 copy of the bucket.


def widened(runs: Sequence[Run], values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the float32 of each run of a bucket, one at a time."""
    for run in runs:
        part = run.of(values)
        yield part if part.dtype == torch.float32 else convert(part, torch.float32)


def landing(runs: Sequence[Run], values: torch.Tensor) -> list[torch.Tensor]:
    """Return where each run of a bucket can be decoded; what is there means nothing."""
    parts = [run.of(values) for run in runs]
    return [
        p if p.dtype == torch.float32 else torch.empty_like(p, dtype=torch.float32) for p in parts
    ]


def finish(
    runs: Sequence[Run],
    parts: Sequence[torch.Tensor],
    values: torch.Tensor,
    divisors: Sequence[int],
    found_inf: torch.Tensor,
) -> None:
    """Divide what has landed and put it in the bucket; the flag tells of Inf and NaN there."""
    for run, part, divisor in zip(runs, parts, divisors, strict=True):
        convert(part, run.of(values), divisor=divisor, found_inf=found_inf)


def agree(
    pieces: Sequence[Piece], rows: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dict[tuple[int, int], torch.Tensor]:
    """Measure values and take the largest over all ranks, where codecs ask for it.

    Args:
        pieces: of a bucket.
        rows: floats of 16 or 32 bits [numel of the bucket] each.
        group: where to agree.

    Returns:
        By a piece's offset and the number of a row: float32, a number for each granule.
    """
    wanted = [p for p in pieces if p.codec.agrees and p.numel > 0]
    if not wanted:
        return {}
    measured = {}
    for row, values in enumerate(rows):
        for piece in wanted:
            (part,) = widened(whole([piece]), values)
            numbers = feedback.measure(piece.codec, part, piece.residual, row=row)
            measured[piece.offset, row] = numbers
    ours = torch.cat(list(measured.values()))
    # Not an all-reduce: backends differ in what the maximum of a NaN is.
    largest = gather_equal(ours, group).amax(0)
    ends = accumulate(m.numel() for m in measured.values())
    return {
        which: largest[end - m.numel() : end]
        for (which, m), end in zip(measured.items(), ends, strict=True)
    }


def gather_equal(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what each rank has, [ranks, numel]; sizes are equal."""
    # torch 2.13 renamed it, and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    result = tensor.new_empty(group.size(), tensor.numel())
    gather(result.view(-1), tensor, group=group)
    return result


def _used(payload: torch.Tensor) -> int:
    return int(payload[:4].view(torch.int32)) & 0xFFFFFFFF
