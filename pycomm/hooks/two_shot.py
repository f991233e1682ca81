"""Compressed all-reduce on any process group: all-to-all of payloads, sum by owners, all-gather.

The same algorithm, cuts and numbers as csrc/collectives/coded.h, on top of torch.distributed and
the codecs' tensor interface; results are equal bit for bit. It works with any backend that moves
bytes, on any device, but nothing overlaps: the "pycomm" backend does this in C++, off the caller's
thread.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import torch
import torch.distributed as dist

from pycomm.codecs import RandomKey
from pycomm.hooks.bucket import Bucket, Piece

GRAIN = 32  # kGrain of coded_layout.h
_MASK = (1 << 64) - 1
# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def hop_seed(seed: int, rank: int) -> int:
    """Seed of what `rank` sends, or with -1 of what owners send back; as in coded.h."""
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
        return self.piece.codec.encoded_bytes(self.end - self.begin)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This run's part of a bucket."""
        return values[self.piece.offset + self.begin : self.piece.offset + self.end]


def granule(piece: Piece) -> int:
    """Return where a piece may be cut; as in coded_layout.cpp."""
    own = piece.codec.granule
    return lcm(own, GRAIN) if own else max(1, piece.numel)


def chunks(bucket: Bucket, ranks: int) -> list[list[Run]]:
    """Return what each rank owns: schedule.h's `chunk` and `append_runs`."""
    offsets = [p.offset for p in bucket.pieces]

    def cut(place: int) -> int:
        found = bisect_right(offsets, place) - 1
        if found < 0:
            return 0
        piece = bucket.pieces[found]
        inside = min(place - piece.offset, piece.numel)
        if inside < piece.numel:
            inside -= inside % granule(piece)
        return piece.offset + inside

    n = bucket.numel
    starts = [cut(n // ranks * r + n % ranks * r // ranks) for r in range(ranks)] + [n]
    owned = []
    for begin, end in pairwise(starts):
        spans = [(p, max(begin, p.offset), min(end, p.offset + p.numel)) for p in bucket.pieces]
        owned.append([Run(p, lo - p.offset, hi - p.offset) for p, lo, hi in spans if lo < hi])
    return owned


def all_reduce(
    values: torch.Tensor,
    bucket: Bucket,
    group: dist.ProcessGroup,
    *,
    side: int,
    seed: int,
    step: int,
) -> torch.Tensor:
    """Average `values` over all ranks of a group, encoded on the way.

    Decoded values are summed in float32 in rank order and divided once, by the owner.

    Args:
        values: float32 [bucket.numel], contiguous; holds the result afterwards.
        bucket: what lies where; its residuals are read from `side` and written to the other.
        group: any process group whose backend has all_to_all_single and all_gather.
        side: 0 or 1.
        seed: equal on all ranks.
        step: number of the step, below 2^32.

    Returns:
        A bool tensor without dimensions: whether the result is finite everywhere.
    """
    rank, ranks = group.rank(), group.size()
    owned = chunks(bucket, ranks)
    sizes = [sum(run.bytes for run in runs) for runs in owned]
    mine = owned[rank]

    def encode(runs: list[Run], out: torch.Tensor, hop: int, worker: bool) -> None:
        key_seed, at = hop_seed(seed, hop), 0
        for run in runs:
            old = new = None
            if run.piece.residual is not None:
                pair = run.piece.residual.worker if worker else run.piece.residual.owner
                old, new = pair[side][run.begin : run.end], pair[1 - side][run.begin : run.end]
            run.piece.codec.encode(
                run.of(values),
                out[at : at + run.bytes],
                old,
                new_residual=new,
                key=RandomKey(key_seed, step, run.piece.tensor),
                index=run.begin,
            )
            at += run.bytes

    def decode(runs: list[Run], payload: torch.Tensor, add: bool) -> None:
        at = 0
        for run in runs:
            codec, part = run.piece.codec, payload[at : at + run.bytes]
            (codec.decode_add if add else codec.decode)(part, run.of(values))
            at += run.bytes

    sent = values.new_empty(sum(sizes), dtype=torch.uint8)
    at = 0
    for runs, size in zip(owned, sizes, strict=True):
        encode(runs, sent[at : at + size], rank, worker=True)
        at += size
    received = sent.new_empty(ranks, sizes[rank])
    dist.all_to_all_single(received.view(-1), sent, [sizes[rank]] * ranks, sizes, group=group)

    for r, part in enumerate(received):
        decode(mine, part, add=r > 0)
    for run in mine:
        # By a tensor: torch multiplies by the reciprocal of a number, which rounds differently.
        part = run.of(values)
        part.div_(torch.full_like(part, ranks))

    result = sent.new_empty(max(sizes))
    encode(mine, result, -1, worker=False)
    results = sent.new_empty(ranks, max(sizes))
    _all_gather(results.view(-1), result, group=group)
    for runs, part in zip(owned, results, strict=True):
        decode(runs, part, add=False)
    return values.isfinite().all()
