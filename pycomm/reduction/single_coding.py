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

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.feedback.rule import EXACT
from pycomm.policy.quality import nominal_error
from pycomm.reduction import paths, two_shot
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import GRAIN, ExchangePlan, chunks, total_bytes, whole

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
        runs = whole(bucket.pieces)
        self._chunks = chunks(runs, self._ranks, grain)
        sent, back = total_bytes(runs), total_bytes(whole(self._answers.pieces))
        self.gathers = self._ranks * sent <= sent + back
        """Whether all payloads go to all ranks; else owners answer."""
        plan = (
            ExchangePlan(shown=runs) if self.gathers else ExchangePlan(self._chunks, gathers=False)
        )
        self._plan = lambda: plan
        self._path: paths.ChosenPath | None = None

    @staticmethod
    def of(bucket: Bucket, group: dist.ProcessGroup) -> SingleCoding | None:
        """Return how a momentum's bucket is averaged; None: as gradients are, with fine codecs."""
        if group.size() == 1 or not any(is_coarse(p.codec) for p in bucket.pieces):
            return None
        single = SingleCoding(bucket, group)
        dense = [p for p in bucket.pieces if p.codec.combine != "gather"]
        if single.gathers and not any(is_coarse(p.codec) for p in dense):
            return None  # payloads are gathered there, too
        return single

    def average(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        *,
        seed: int,
        encoded: Callable[[], None] | None,
        **options: Any,
    ) -> None:
        """Average `values` over the group, in place.

        Args:
            values: floats of 16 or 32 bits [bucket.numel], contiguous.
            bucket: the bucket for which this was made.
            seed, encoded, options: as for `two_shot.exchange`, whose errors it raises.
        """
        both = values, values
        two_shot.exchange(
            *("single", self._plan, *both, bucket, self._group),
            seed=seed,
            divisor=self._ranks,
            encoded=encoded,
            **options,
        )
        if not self.gathers:
            two_shot.exchange(
                *("answers", self._plan_of_answers, *both, self._answers, self._group),
                seed=seed ^ _ANSWER_SEED,
                divisor=1,
                # What is not finite in our chunk is so in its answer, too, which all ranks get.
                **options,
            )

    def path(self, bucket: Bucket, values: torch.Tensor) -> paths.ChosenPath:
        """Return the path of `average`, whose arguments these are."""
        if self._path is None:
            ways = [two_shot.find("single", self._plan, bucket, self._group, values)]
            if not self.gathers:
                plan = self._plan_of_answers
                ways.append(two_shot.find("answers", plan, self._answers, self._group, values))
            by_kernels = not values.is_cpu and all(
                isinstance(way, two_shot.Batched) for way in ways
            )
            self._path = paths.ChosenPath(paths.SINGLE_KERNELS if by_kernels else paths.SINGLE)
        return self._path

    def _plan_of_answers(self) -> ExchangePlan:
        """Each owner sends all ranks the result of its chunk."""
        pieces = {piece.offset: piece for piece in self._answers.pieces}
        owned = [[replace(run, piece=pieces[run.piece.offset]) for run in c] for c in self._chunks]
        return ExchangePlan(owned, scatters=False)


def _answers(bucket: Bucket) -> Bucket:
    """Return the bucket of the owners' results: the same pieces, finely coded, without residual."""
    pieces = [
        replace(p, codec=ANSWER if is_coarse(p.codec) else p.codec, residual=None)
        for p in bucket.pieces
    ]
    answers = Bucket([], [], None, torch.device("cpu"))
    answers.pieces, answers.numel = pieces, bucket.numel
    return answers
