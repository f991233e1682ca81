"""Choice of a codec by measured step time, for codec="auto".

Every candidate is measured, exact steps too: each has a few steps in every round, and the rounds
alternate, so that a passing load affects all candidates alike. Two candidates are compared round by
round, and a coarser one counts as faster only if it is faster by a margin and the differences are
significant (Wilcoxon's signed-rank test). The choice is the finest candidate such that no other is
faster: exact, if compression does not pay or the measurements are inconclusive.

On a slow link exact steps may take ten times as long. A candidate that takes far longer than the
fastest in its first look gets two more looks, a round apart, and is then left out: this costs a
bounded number of steps. Afterwards the time of steps is watched, and candidates are tried again
when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import log
from statistics import median
from typing import Any

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.policy.quality import reduced_error
from pycomm.policy.rules import Policy

Exchange = Callable[[Sequence[float]], list[list[float]]]
"""This rank's numbers -> the numbers of all ranks, in rank order."""

TRYING = "auto: trying"
AUTO_ERROR = 0.2
"""Default bound of the error for "auto": it allows int4, but no fewer bits."""
UNBIASED = 3.0
"""Multiple of that bound for unbiased codecs: their errors cancel over the steps, and EDEN with 2
bits (error 0.5) trains as well as int4 (0.17), see docs/choosing.md."""
AUTO_CANDIDATES = (
    *("fp32", "bf16", "int8", "int4", "eden:bits=2,size=128", "eden:bits=1"),
    *("sign", "topk:0.01"),
)

_STEPS = 3  # of a candidate in a round, whose median counts
_AGAIN = 1000  # steps after which candidates are tried again; doubles while the choice stays
_WATCH = 100  # steps whose median is compared with that after the choice
_FIRST = 3  # steps before the first trial, in which DDP rebuilds its buckets and caches are cold
_LOOKS, _LOOK = 3, 2  # looks at a candidate that takes far longer, and steps of each look
_DOUBT = 0.01
_SKIP = 1  # steps that are not timed after each change: new buckets and cold caches
_ROUNDS = 8  # before differences are judged
_MORE = 4  # rounds from one judgement to the next
_MOST = 16  # rounds; the last ones are for candidates that seem faster, but not significantly
_MARGIN = 0.03  # least gain for which a coarser codec is taken, as a fraction of a step's time
_HOPELESS = 2.0  # who takes this many times the fastest's time in each look is left out
_CHANGE = 1.25  # of a watch's median, up or down, twice in a row: candidates are tried again
_RAREST = 16  # largest multiple of _AGAIN


def accurate_enough(policy: Policy) -> list[Codec]:
    """Return the codecs from which a policy with "auto" chooses.

    Args:
        policy: the policy, with its candidates and its bound of the error.
    """
    if policy.candidates:
        return [parse_codec(spec) for spec in policy.candidates]
    bound = policy.error or AUTO_ERROR
    usual = [parse_codec(spec) for spec in AUTO_CANDIDATES]
    return [c for c in usual if reduced_error(c) <= bound * (UNBIASED if c.unbiased else 1)]


class Auto:
    """State machine that chooses the current candidate from the seconds of each step.

    Every rank makes the same calls in the same order. Measured times differ between ranks, so only
    `judge` decides, from the times that all ranks have exchanged.

    Args:
        candidates: text of each candidate, and its size, which is larger for finer ones.
    """

    def __init__(self, candidates: Mapping[str, float]) -> None:
        if not candidates:
            raise ValueError("auto: no candidate is accurate enough: give a larger error=")
        self.candidates = sorted(candidates, key=candidates.__getitem__)
        self.reason = TRYING
        self._at = 0
        """Index of the current candidate."""
        self._chosen: int | None = None
        """Index of the chosen candidate; None before the first choice."""
        self.trying = True
        """A trial is going on; else a choice holds."""
        self._again = _AGAIN
        """Steps from the choice to the next trial."""
        self._since = 0
        """Steps since the choice."""
        self._usual: float | None = None
        """Seconds of a step in the first watch after the choice."""
        self._changed = False
        """The last watch differed by more than `_CHANGE`."""
        self._seconds: list[float] = []
        """Seconds of the steps that are being timed."""
        self._left_out = 0
        """Number of coming steps that are not timed."""
        self._round = 0
        self._alive: list[int] = []
        """Candidates of this trial that may still be chosen."""
        self._waiting: list[int] = []
        """Candidates that are still to be timed in this round."""
        self._blocks: list[dict[int, float]] = []
        """Seconds of a step of each candidate, by round."""
        self._suspects: set[int] = set()
        """Candidates that took far longer than the fastest in each look."""
        self._begin()
        self._left_out += _FIRST

    @property
    def codec(self) -> str:
        """Text of the current candidate."""
        return self.candidates[self._at]

    def step(self, seconds: float, exchange: Exchange) -> bool:
        """Record the time of the last step; return whether codec or reason change. Collective.

        Args:
            seconds: time of the step on this rank.
            exchange: function that gathers the numbers of all ranks.
        """
        before = self.codec, self.reason
        own = self.note(seconds)
        if own is not None:
            self.judge([row[0] for row in exchange([own])])
        return before != (self.codec, self.reason)

    def note(self, seconds: float) -> float | None:
        """Record the time of a step on this rank.

        Returns:
            The median of a complete block of steps, to exchange and pass to `judge`, at the same
            step on all ranks; else None.
        """
        if not self.trying:
            self._since += 1
            if len(self.candidates) == 1:
                return None
            if self._since >= self._again:
                self._begin()
                return None
        elif self._left_out:
            self._left_out -= 1
            return None
        self._seconds.append(max(seconds, 1e-9))  # positive, for the logarithms
        return median(self._seconds) if len(self._seconds) == self._needed else None

    def judge(self, medians: Sequence[float]) -> None:
        """Move to the next candidate, or choose one; after the choice, check whether it holds.

        Args:
            medians: results of `note` on each rank. The slowest rank's counts, since all wait for
                it.
        """
        seconds = max(medians)
        self._seconds = []
        if not self.trying:
            return self._watched(seconds)
        self._blocks[self._at][self._round] = seconds
        if self._waiting:
            return self._try(self._waiting.pop(0))
        if self._round < _LOOKS:
            self._leave_out_the_hopeless()
        self._round += 1
        if self._round >= _ROUNDS and (self._round - _ROUNDS) % _MORE == 0:
            self._leave_out_the_slower()
        if len(self._alive) == 1 or self._round >= _MOST:
            return self._choose()
        # The order alternates, so that a growing load affects the first and the last alike.
        self._waiting = self._alive[:: -1 if self._round % 2 else 1]
        return self._try(self._waiting.pop(0))

    # ------------------------------------------------------------------ a trial

    def _begin(self) -> None:
        self.trying = True
        self.reason = TRYING
        self._round = 0
        self._alive = list(range(len(self.candidates)))
        self._waiting = self._alive[1:]
        self._blocks = [{} for _ in self.candidates]
        self._suspects = set()
        self._try(0)

    def _try(self, i: int) -> None:
        self._left_out = 0 if i == self._at and self._round else _SKIP
        self._at = i
        self._seconds = []

    @property
    def _needed(self) -> int:
        if not self.trying:
            return _WATCH
        look = self._round == 0 or (self._round < _LOOKS and self._at in self._suspects)
        return _LOOK if look else _STEPS

    def _leave_out_the_hopeless(self) -> None:
        """After the first rounds, leave out candidates that were far too slow in each of them."""
        seconds = {i: self._blocks[i][self._round] for i in self._alive}
        bound = _HOPELESS * min(seconds.values())
        slow = {i for i, s in seconds.items() if s >= bound}
        self._suspects = slow if self._round == 0 else self._suspects & slow
        if self._round == _LOOKS - 1:
            self._alive = [i for i in self._alive if i not in self._suspects]

    def _leave_out_the_slower(self) -> None:
        """Leave out candidates that another beats, and those that do not seem faster than the
        finest one left."""
        slower = {i for i in self._alive if any(self._beats(k, i) for k in self._alive)}
        self._alive = [i for i in self._alive if i not in slower]
        finest = self._alive[-1]
        self._alive = [i for i in self._alive if i == finest or median(self._gains(i, finest)) > 0]

    def _gains(self, i: int, k: int) -> list[float]:
        """Return how much faster i was than k in each round, beyond the margin, in logarithms."""
        mine, theirs = self._blocks[i], self._blocks[k]
        least = log(1 + _MARGIN)
        return [log(theirs[r] / mine[r]) - least for r in mine.keys() & theirs.keys()]

    def _beats(self, i: int, k: int) -> bool:
        gains = self._gains(i, k)
        return likely(gains) <= _DOUBT

    def _choose(self) -> None:
        best = self._alive[-1]
        same = best == self._chosen
        self._again = min(2 * self._again, _RAREST * _AGAIN) if same else _AGAIN
        self._at = self._chosen = best
        self.trying = self._changed = False
        self._since = 0
        self._usual = None
        times = {i: median(blocks.values()) for i, blocks in enumerate(self._blocks) if blocks}
        measured = ", ".join(f"{self.candidates[i]} {t:.3g} s" for i, t in times.items())
        self.reason = f"auto, by time of a step: {measured}"

    # ------------------------------------------------------------------ afterwards

    def _watched(self, seconds: float) -> None:
        if self._usual is None:
            self._usual = seconds
            return
        changed = abs(log(seconds / self._usual)) > log(_CHANGE)
        if changed and self._changed:
            self._again = _AGAIN
            self._begin()
        else:
            self._changed = changed

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, if it was made, to checkpoint."""
        name = None if self._chosen is None else self.candidates[self._chosen]
        return {"chosen": name, "since": self._since, "again": self._again}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a choice; one that is no candidate here is ignored, and trials begin anew."""
        if state["chosen"] not in self.candidates:
            return
        self._at = self._chosen = self.candidates.index(state["chosen"])
        self.trying = self._changed = False
        self._since = state["since"]
        self._again = state["again"]
        self._usual = None
        self._seconds = []
        self.reason = "auto, by time of a step before the checkpoint"


def likely(gains: Sequence[float]) -> float:
    """Return the probability of these or clearer gains if the sign of each were random.

    This is Wilcoxon's signed-rank test, one-sided and exact. Gains of 0 count as losses.
    """
    ranked = sorted(gains, key=abs)
    won = sum(rank for rank, gain in enumerate(ranked, start=1) if gain > 0)
    ways = _ways(len(gains))
    return sum(ways[won:]) / float(2 ** len(gains))


@cache
def _ways(n: int) -> tuple[int, ...]:
    """Return by sum the number of subsets of the ranks 1 to n that have it."""
    ways = [1]
    for rank in range(1, n + 1):
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    return tuple(ways)
