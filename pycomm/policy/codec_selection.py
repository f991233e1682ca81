"""Choice of the codec with the shortest steps, for codec="auto".

It decides from numbers that are equal on all ranks, the results of `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycomm.codecs import Codec, short_text
from pycomm.codecs import codec as parse_codec
from pycomm.policy.auto import TRYING, Auto
from pycomm.policy.quality import bits, reduced_error
from pycomm.policy.rules import Policy

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


class Fastest:
    """Choice of the codec with the shortest steps among those that are accurate enough.

    Args:
        policy: the policy, with its candidates and its bound of the error.
        refusal: function that returns why the hook cannot use a codec; "": it can.
    """

    def __init__(self, policy: Policy, refusal: Callable[[Codec], str] = lambda _: "") -> None:
        bound = policy.error or AUTO_ERROR
        found = [parse_codec(spec) for spec in policy.candidates]
        if not found:
            found = [parse_codec(spec) for spec in AUTO_CANDIDATES]
            found = [
                c for c in found if reduced_error(c) <= bound * (UNBIASED if c.unbiased else 1)
            ]
            found = [c for c in found if not refusal(c)]
        self._codecs = {short_text(codec): codec for codec in found}
        self._auto: Auto | None = None
        self._saved: Mapping[str, Any] | None = None

    @property
    def codecs(self) -> list[Codec]:
        """The candidates."""
        return list(self._codecs.values())

    def codec(self) -> Measured:
        """Return the codec of the parameters that no rule matches, and the reason."""
        if self._auto is None:
            return min(self._codecs.values(), key=bits), TRYING
        return self._codecs[self._auto.codec], self._auto.reason

    def step(self, seconds: float, exchange: Exchange, sizes: Callable[[Codec], int]) -> bool:
        """Record the time of the last step; return whether the codec changes. Collective.

        Args:
            seconds: time of the step on this rank.
            exchange: function that gathers the numbers of all ranks.
            sizes: function that returns the bytes of all payloads of a step if all parameters
                without a rule have this codec.
        """
        if self._auto is None:
            by_size = {sizes(codec): text for text, codec in self._codecs.items()}
            candidates = {text: size for size, text in by_size.items()}
            self._auto = Auto(candidates)
            if self._saved is not None:
                self._auto.load_state_dict(self._saved)
            return True
        before = (self._auto.codec, self._auto.reason)
        own = self._auto.note(seconds)
        if own is not None:
            self._auto.judge([row[0] for row in exchange([own])])
        return before != (self._auto.codec, self._auto.reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint; equal on all ranks."""
        return self._auto.state_dict() if self._auto else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        if not state:
            return
        if self._auto is None:
            self._saved = state
        else:
            self._auto.load_state_dict(state)
