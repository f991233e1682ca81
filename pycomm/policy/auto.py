"""codec="auto": the measured time of steps decides.

Candidates are tried from the smallest payload to the largest, each for a few steps. The time of a
step as a function of its payload is convex (it is constant while communication hides behind
computing, and grows with the bytes when it does not), so two dense candidates tell the least that a
larger one will take: where that is clearly too much it is not tried. So on a slow link exact
steps, which may take ten times as long, are never made.

The choice is the finest candidate that is not slower than the fastest by more than a margin: exact,
if compression does not pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

TRYING = "auto: trying"


@dataclass(frozen=True)
class Candidate:
    """A codec, by its text, and the bytes of all payloads of one step with it."""

    name: str
    bytes: int
    dense: bool = True
    """Whether it codes every value, in a time that is much the same for all that do."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How candidates are tried."""

    skip: int = 2
    """Steps that are left out after each change: new buckets, cold caches."""
    steps: int = 5
    """Steps whose median counts."""
    margin: float = 0.03
    """What a coarser codec must win to be taken, as a part of the step's time."""
    hopeless: float = 1.5
    """A larger candidate is not tried if it takes at least this times the fastest's time."""
    again: int = 1000
    """Steps after which candidates are tried again."""
    first: int = 3
    """Steps before the first trial: DDP makes its buckets anew, caches are cold."""


class Auto:
    """Which candidate is in force, given the seconds of each step.

    Every rank makes the same calls in the same order. Numbers of the clock differ between ranks, so
    only `judge` decides, from what all ranks have told each other.

    Args:
        candidates: in any order; payloads of different sizes.
        trial: how they are tried.
    """

    def __init__(self, candidates: Sequence[Candidate], trial: Trial) -> None:
        if not candidates:
            raise ValueError("auto: there is no candidate")
        self.candidates = sorted(candidates, key=lambda c: c.bytes)
        self.trial = trial
        self.reason = TRYING
        self._at = 0
        """The candidate in force."""
        self._chosen: int | None = None
        """The choice, or before the first one None."""
        self._trying = True
        self._left_out = trial.first + trial.skip
        self._seconds: list[float] = []
        self._results: dict[int, float] = {}
        self._expected: dict[int, float] = {}
        self._since = 0

    @property
    def codec(self) -> str:
        """The candidate in force."""
        return self.candidates[self._at].name

    @property
    def settled(self) -> bool:
        """Whether a choice was made and no trial is going on."""
        return not self._trying

    def note(self, seconds: float) -> float | None:
        """Take the time of a step on this rank.

        Returns:
            The median of a candidate whose steps are complete: exchange it and call `judge`. All
            ranks come to this at the same step.
        """
        if not self._trying:
            self._since += 1
            if self._since >= self.trial.again and len(self.candidates) > 1:
                self._try(0)
                self._trying = True
                self.reason = TRYING
                self._results, self._expected = {}, {}
            return None
        if self._left_out:
            self._left_out -= 1
            return None
        self._seconds.append(seconds)
        return median(self._seconds) if len(self._seconds) == self.trial.steps else None

    def judge(self, medians: Sequence[float]) -> None:
        """Go on to the next candidate, or choose.

        Args:
            medians: what `note` returned on each rank. The slowest rank's counts, since all wait
                for it.
        """
        self._results[self._at] = max(medians)
        following = self._at + 1
        if following == len(self.candidates):
            return self._choose()
        least = self._least(following)
        fastest = min(self._results.values())
        if least < self.trial.hopeless * fastest:
            return self._try(following)
        for i in range(following, len(self.candidates)):
            self._expected[i] = self._least(i)
        return self._choose()

    def _try(self, i: int) -> None:
        self._left_out = self.trial.skip + (self.trial.first if not self._results else 0)
        self._at = i
        self._seconds = []

    def _least(self, i: int) -> float:
        """The least that a candidate will take, from the two largest dense ones that were tried."""
        tried = [(k, t) for k, t in sorted(self._results.items()) if self.candidates[k].dense]
        if len(tried) < 2:
            return 0.0
        (small, fast), (large, slow) = tried[-2:]
        gained = (slow - fast) / (self.candidates[large].bytes - self.candidates[small].bytes)
        # Differences within the margin are noise, and tell nothing of what lies beyond.
        if slow <= fast * (1 + self.trial.margin):
            return 0.0
        return slow + gained * (self.candidates[i].bytes - self.candidates[large].bytes)

    def _choose(self) -> None:
        fastest = min(self._results.values())
        near = [i for i, t in self._results.items() if t <= fastest * (1 + self.trial.margin)]
        best = max(near)
        # What is in force already stays, unless another one is better by the margin.
        if self._chosen in near and self._results[best] > self._results[self._chosen]:
            best = self._chosen
        self._at = self._chosen = best
        self._trying = False
        self._since = 0
        self._seconds = []
        measured = [f"{self.candidates[i].name} {t:.3g} s" for i, t in self._results.items()]
        expected = [
            f"{self.candidates[i].name} at least {t:.3g} s" for i, t in self._expected.items()
        ]
        self.reason = f"auto, by time of a step: {', '.join(measured + expected)}"

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, as far as it was made."""
        name = None if self._chosen is None else self.candidates[self._chosen].name
        return {"chosen": name, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a choice over. A choice that is no candidate here is left, and trials begin anew."""
        names = [c.name for c in self.candidates]
        if state["chosen"] not in names:
            return
        self._at = self._chosen = names.index(str(state["chosen"]))
        self._trying = False
        self._since = state["since"]
        self.reason = "auto, by time of a step before the checkpoint"
