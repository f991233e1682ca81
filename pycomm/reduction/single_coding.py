"""Averages whose contributions are coded once, with feedback, and whose results have no lag.

The two-shot reduction codes every value twice, and both codings have a residual. For a codec that
leaves much of its input to later steps (one bit, a few values of a hundred), the owner's residual
is a second delay in series with the worker's, and training with momentum does not tolerate two. So
here either

* all ranks get all payloads and add them up ("gathered"), or
* the owner of an element answers with a fine, unbiased codec that needs no residual ("answered"),

whichever sends fewer bytes. That depends on sizes alone, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.feedback.rule import EXACT
from pycomm.policy.quality import nominal_error
from pycomm.reduction.batched import Batched
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import (
    GRAIN,
    Coder,
    Run,
    chunks,
    finish,
    float32_view,
    is_variable,
    total_bytes,
    whole,
    widened,
)
from pycomm.reduction.payloads import all_gather, all_to_all, parts

ANSWER = parse_codec("eden:bits=4,size=128")
"""Codec of the owners' results: its squared error is 0.0096, without bias."""

COARSE = 0.05
"""Relative squared error of one coding from which a second one with a residual delays too much:
with a momentum of 0.9, int4 (0.014) twice is as stable as once, 3 bits (0.06) lose half."""

_ANSWER_SEED = 0x9E3779B97F4A7C15  # results have other random numbers than contributions


def is_coarse(codec: Codec) -> bool:
    """Whether a codec should not be used twice in series."""
    return codec != EXACT and nominal_error(codec) ** 2 > COARSE


class SingleCoding:
    """The average of a bucket's values over a group, coded once on the way.

    Args:
        bucket: layout, codecs and residuals of the values; no codec combines by factors.
        group: any process group whose backend has all_gather and all_to_all_single.
    """

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        # The bucket is not stored, since it holds this object: its memory would stay until the
        # cycle is collected.
        self._group = group
        self._ranks, self._rank = group.size(), group.rank()
        self._answers = _answers(bucket)
        grain = lcm(GRAIN, *(a.codec.granule or 1 for a in self._answers.pieces))
        self._chunks = chunks(whole(bucket.pieces), self._ranks, grain)
        sent, back = total_bytes(whole(bucket.pieces)), total_bytes(whole(self._answers.pieces))
        self.gathers = self._ranks * sent <= sent + back
        """Whether all payloads go to all ranks; else owners answer."""
        self.wire_bytes = (self._ranks - 1) * sent
        """Bytes that a rank sends in a step, rounded up."""
        if not self.gathers:
            self.wire_bytes = -(-(self._ranks - 1) * (sent + back) // self._ranks)

    def average(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        *,
        seed: int,
        step: int,
        encoded: Callable[[], None],
    ) -> torch.Tensor:
        """Average `values` over the group, in place.

        Args:
            values: floats of 16 or 32 bits [bucket.numel], contiguous.
            bucket: the bucket for which this was made.
            seed: equal on all ranks.
            step: number of the step, below 2^32.
            encoded: is called when this rank's contribution and its residuals are written, and
                `values` are as they were.

        Returns:
            A bool tensor without dimensions: whether the result is finite everywhere, equal on all
            ranks.

        Raises:
            WireMismatch: a rank sends payloads of impossible sizes.
        """
        if self.gathers:
            return self._gather(values, bucket, seed, step, encoded)
        return self._answer(values, bucket, seed, step, encoded)

    def _gather(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        seed: int,
        step: int,
        encoded: Callable[[], None],
    ) -> torch.Tensor:
        ranks, shown = self._ranks, whole(bucket.pieces)
        batched = Batched.find("gathered", bucket, self._group, lambda: [shown], values)
        if batched is not None:
            batched.begin(
                bucket.sides, values.dtype, self._group, seed=seed, step=step, divisor=ranks
            )
            shown_ = batched.show(values, 0)
            encoded()
            return batched.verdict(batched.add_up(values, 0, shown_))
        coder = Coder(self._rank, seed=seed, step=step)
        ours = coder.encode(shown, widened(shown, values), values.device, worker=True)
        most, variable = [total_bytes(shown)] * ranks, is_variable(shown)
        came = all_gather(ours, ours.numel(), most, self._group, variable=variable)
        encoded()
        return self._add_up(values, shown, coder, parts(came))

    def _answer(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        seed: int,
        step: int,
        encoded: Callable[[], None],
    ) -> torch.Tensor:
        dealt, ranks, own = self._chunks, self._ranks, self._chunks[self._rank]
        batched = Batched.find("dealt", bucket, self._group, lambda: dealt, values)
        if batched is not None:
            batched.begin(
                bucket.sides, values.dtype, self._group, seed=seed, step=step, divisor=ranks
            )
            scattered = batched.scatter(values)
            encoded()
            batched.verdict(batched.add_up(values, self._rank, scattered))
        else:
            coder = Coder(self._rank, seed=seed, step=step)
            sent = [
                coder.encode(runs, widened(runs, values), values.device, worker=True)
                for runs in dealt
            ]
            came = all_to_all(
                torch.cat(sent),
                [payload.numel() for payload in sent],
                total_bytes(own),
                self._group,
                variable=any(map(is_variable, dealt)),
            )
            encoded()
            self._add_up(values, own, coder, parts(came))
        return self._send_back(values, seed ^ _ANSWER_SEED, step)

    def _send_back(self, values: torch.Tensor, seed: int, step: int) -> torch.Tensor:
        """Send our chunk's result to all ranks, and write those of all ranks."""
        pieces = {piece.offset: piece for piece in self._answers.pieces}
        dealt = [[replace(run, piece=pieces[run.piece.offset]) for run in c] for c in self._chunks]
        answers = self._answers
        batched = Batched.find("answers", answers, self._group, lambda: dealt, values)
        if batched is not None:
            batched.begin(answers.sides, values.dtype, self._group, seed=seed, step=step, divisor=1)
            return batched.verdict(batched.land(values, batched.show_own(values, self._rank)))
        coder = Coder(self._rank, seed=seed, step=step)
        own, most = dealt[self._rank], [total_bytes(runs) for runs in dealt]
        ours = coder.encode(own, widened(own, values), values.device, worker=True)
        came = all_gather(ours, ours.numel(), most, self._group, variable=False)
        found_inf = torch.zeros(1, dtype=torch.float32, device=values.device)
        for runs, payload in zip(dealt, parts(came), strict=True):
            floats = float32_view(runs, values)
            coder.decode(runs, payload, floats, add=False)
            finish(runs, floats, values, 1, found_inf)
        return found_inf[0] == 0

    def _add_up(
        self,
        values: torch.Tensor,
        runs: Sequence[Run],
        coder: Coder,
        payloads: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        found_inf = torch.zeros(1, dtype=torch.float32, device=values.device)
        sums = float32_view(runs, values)
        for r, payload in enumerate(payloads):
            coder.decode(runs, payload, sums, add=r > 0)
        finish(runs, sums, values, self._ranks, found_inf)
        return found_inf[0] == 0


def _answers(bucket: Bucket) -> Bucket:
    """Return the bucket of the owners' results: the same pieces, finely coded, without residual."""
    pieces = [
        replace(p, codec=ANSWER if is_coarse(p.codec) else p.codec, residual=None)
        for p in bucket.pieces
    ]
    answers = Bucket([], [], None, torch.device("cpu"))
    answers.pieces, answers.numel = pieces, bucket.numel
    return answers
