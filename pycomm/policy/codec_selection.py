"""Choice of codecs by measurements: "auto" by time, a budget by energy, a bound by error.

Each decides from numbers that are equal on all ranks: the results of `exchange` and of the checks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm.codecs import ALIASES, CODECS, SCHEMES, Codec, short_text
from pycomm.codecs import codec as parse_codec
from pycomm.codecs.args import RandomKey
from pycomm.codecs.philox import random_words, sampled_places
from pycomm.policy.auto import TRYING, Auto, Candidate
from pycomm.policy.budget import Budget, Choice
from pycomm.policy.quality import bits, nominal_error, reduced_error
from pycomm.policy.rules import AUTO, EXACT, Parameter, Policy
from pycomm.policy.samples import Quality, SampledPiece

Exchange = Callable[[Sequence[float]], list[list[float]]]
"""This rank's numbers -> the numbers of all ranks, in rank order."""
Measured = tuple[Codec, str]
"""A codec and the reason for it."""

AUTO_ERROR = 0.2
"""Default bound of the error for "auto": it allows int4, but no fewer bits."""
UNBIASED = 3.0
"""Multiple of that bound for unbiased codecs: their errors cancel over the steps, and EDEN with 2
bits (error 0.5) trains as well as int4 (0.17), see docs/choosing.md."""
AUTO_CANDIDATES = (
    *("fp32", "bf16", "int8", "int4", "eden:bits=2,size=128", "eden:bits=1"),
    *("sign", "topk:0.01", "powersgd:4"),
)
OTHER = "with torch's AdamW, pycomm.code_optimizer(optimizer, model, 'sign')"
"""What "auto" cannot try by itself, since the optimizer takes part in it."""
BIT_CANDIDATES = tuple(f"quant:bits={b}" for b in range(2, 9))
BUDGET_CANDIDATES = tuple(f"eden:bits={b}" for b in range(1, 9))
"""At equal bits EDEN has the least error of all, and no bias that feedback must correct."""


class CodecSelection(ABC):
    """Base class of the three: by default the codecs do not change.

    A subclass implements `codec`, and those of the other methods that it needs.
    """

    @abstractmethod
    def codec(self, name: str) -> Measured:
        """Return the codec of a parameter that no rule matches, and the reason."""

    def enter(self, parameter: Parameter) -> None:  # noqa: B027
        """Enter a parameter that no rule matches."""

    def step(self, seconds: float, exchange: Exchange, sizes: Callable[[Codec], int]) -> bool:
        """Record the time of the last step; return whether a codec changes. Collective.

        Args:
            seconds: time of the step on this rank.
            exchange: function that gathers the numbers of all ranks.
            sizes: function that returns the bytes of all payloads of a step if all parameters
                without a rule have this codec.
        """
        return False

    def checked(self, found: Mapping[str, Quality]) -> bool:
        """Record the results of a check; return whether a codec changes."""
        return False

    def probe(self, values: torch.Tensor, pieces: Sequence[SampledPiece]) -> None:  # noqa: B027
        """Look at a bucket's gradients before they are reduced."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint; equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the state from `state_dict`."""


def _any(_: Codec) -> str:
    return ""


def select_codecs(policy: Policy, refusal: Callable[[Codec], str] = _any) -> CodecSelection | None:
    """Return the codec selection of a policy, or None if the policy decides all codecs itself.

    Args:
        policy: the policy.
        refusal: function that returns why the hook cannot use a codec; "": it can.
    """
    if policy.codec == AUTO:
        return Fastest(policy, refusal)
    if policy.budget is not None:
        return Allotted(policy.budget, _candidates(policy, BUDGET_CANDIDATES))
    if policy.error is not None:
        return Bounded(policy.error, _candidates(policy, (*BIT_CANDIDATES, "bf16", EXACT)))
    return None


def _candidates(policy: Policy, suitable: Sequence[str]) -> list[Codec]:
    if policy.candidates:
        return [parse_codec(spec) for spec in policy.candidates]
    known = (spec for spec in suitable if spec.partition(":")[0] in (*CODECS, *SCHEMES, *ALIASES))
    return [parse_codec(spec) for spec in known]


class Fastest(CodecSelection):
    """Choice of the codec with the shortest steps among those that are accurate enough."""

    def __init__(self, policy: Policy, refusal: Callable[[Codec], str] = _any) -> None:
        bound = policy.error or AUTO_ERROR
        found = _candidates(policy, AUTO_CANDIDATES)
        if not policy.candidates:
            found = [
                c for c in found if reduced_error(c) <= bound * (UNBIASED if c.unbiased else 1)
            ]
            found = [c for c in found if not refusal(c)]
        self._codecs = {short_text(codec): codec for codec in found}
        self._trial = policy.trial
        self._auto: Auto | None = None
        self._saved: Mapping[str, Any] | None = None

    @property
    def codecs(self) -> list[Codec]:
        """The candidates."""
        return list(self._codecs.values())

    def codec(self, name: str) -> Measured:
        if self._auto is None:
            return min(self._codecs.values(), key=bits), TRYING
        return self._codecs[self._auto.codec], self._auto.reason

    def step(self, seconds: float, exchange: Exchange, sizes: Callable[[Codec], int]) -> bool:
        if self._auto is None:
            by_size = {sizes(codec): text for text, codec in self._codecs.items()}
            candidates = [Candidate(text, size) for size, text in by_size.items()]
            other = Candidate(OTHER, sizes(parse_codec("sign")))
            self._auto = Auto(candidates, self._trial, other)
            if self._saved is not None:
                self._auto.load_state_dict(self._saved)
            return True
        before = (self._auto.codec, self._auto.reason)
        own = self._auto.note(seconds)
        if own is not None:
            self._auto.judge([row[0] for row in exchange([own])])
        return before != (self._auto.codec, self._auto.reason)

    def state_dict(self) -> dict[str, Any]:
        return self._auto.state_dict() if self._auto else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        if self._auto is None:
            self._saved = state
        else:
            self._auto.load_state_dict(state)


class Allotted(CodecSelection):
    """Allocation of bits by measured energy, within a budget."""

    EVERY = 100
    """Steps from one measurement to the next; the first is made at once."""
    VALUES = 4096
    """Largest number of sampled values of a parameter."""

    def __init__(self, budget: float, candidates: Sequence[Codec]) -> None:
        self._codecs = list(candidates)
        choices = [Choice(bits(codec), reduced_error(codec) ** 2) for codec in candidates]
        self._budget = Budget(budget, choices)
        within = [i for i, choice in enumerate(choices) if choice.bits <= budget]
        if not within:
            least = min(choice.bits for choice in choices)
            raise ValueError(
                f"policy: budget={budget} bits per value is less than the smallest candidate "
                f"takes: give {least:.3g} or more"
            )
        self._first = max(within, key=lambda i: choices[i].bits)
        self._numels: dict[str, int] = {}
        self._steps = 0
        self._sums: dict[str, torch.Tensor] = {}
        """Sums of squares in the last step, by name."""

    def enter(self, parameter: Parameter) -> None:
        self._numels[parameter.name] = parameter.numel

    def codec(self, name: str) -> Measured:
        place = self._budget.places.get(name)
        if place is None:
            return self._codecs[self._first], f"budget of {self._budget.bits:g} bits per value"
        return self._codecs[place], f"budget of {self._budget.bits:g} bits per value, by energy"

    @property
    def _due(self) -> bool:
        return self._steps % self.EVERY == 1

    def probe(self, values: torch.Tensor, pieces: Sequence[SampledPiece]) -> None:
        if not self._due:
            return
        flat = values.detach().view(-1)
        # The key is equal for all parameters and ranks, and differs between measurements.
        words = random_words(RandomKey(step=self._steps), 0, self.VALUES, flat.device)
        for piece in pieces:
            if piece.name in self._numels and piece.numel > 0:
                places = sampled_places(words, piece.numel, -(-piece.numel // self.VALUES))
                part = flat[piece.offset + places].float()
                self._sums[piece.name] = part.square().mean() * piece.numel

    def step(self, seconds: float, exchange: Exchange, sizes: Callable[[Codec], int]) -> bool:
        measured = self._due
        self._steps += 1
        if not measured:
            return False
        sums = {name: float(total) for name, total in self._sums.items()}
        self._sums.clear()
        rows = exchange([sums.get(name, 0.0) for name in self._numels])
        totals = map(sum, zip(*rows, strict=True))
        return self._budget.measured(dict(zip(self._numels, totals, strict=True)), self._numels)

    def state_dict(self) -> dict[str, Any]:
        return {"places": dict(self._budget.places), "energies": dict(self._budget.energies)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._budget.places = dict(state["places"])
        self._budget.energies = dict(state["energies"])


class Bounded(CodecSelection):
    """Choice of the fewest bits with which a parameter's sampled error stays within a bound."""

    ROOM = 1.25
    """Fewer bits are taken only if their expected error times this is within the bound."""

    def __init__(self, bound: float, candidates: Sequence[Codec]) -> None:
        self._bound = bound
        self._codecs = sorted(candidates, key=lambda codec: -nominal_error(codec))
        within = (i for i, c in enumerate(self._codecs) if reduced_error(c) * self.ROOM <= bound)
        self._first = next(within, len(self._codecs) - 1)
        self._places: dict[str, int] = {}
        self._errors: dict[str, float] = {}

    def codec(self, name: str) -> Measured:
        codec = self._codecs[self._places.get(name, self._first)]
        if name in self._errors:
            return codec, f"error at most {self._bound:g}, adjusted by samples"
        return codec, f"error at most {self._bound:g}"

    def checked(self, found: Mapping[str, Quality]) -> bool:
        changed = False
        for name, quality in found.items():
            place = self._places.get(name, self._first)
            moved = self._moved(place, quality.error)
            if moved != place:
                self._places[name] = moved
                self._errors[name] = quality.error
                changed = True
        return changed

    def _moved(self, place: int, error: float) -> int:
        if error > self._bound:
            return min(place + 1, len(self._codecs) - 1)
        if place == 0:
            return place
        here, coarser = (reduced_error(self._codecs[i]) for i in (place, place - 1))
        promised = error * coarser / here if here else coarser
        return place - 1 if promised * self.ROOM <= self._bound else place

    def state_dict(self) -> dict[str, Any]:
        return {"places": dict(self._places), "errors": dict(self._errors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._places = dict(state["places"])
        self._errors = dict(state["errors"])
