"""Configuration of feedback as data, and its text form: "decay:0.9,storage=int8"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from pycomm.arguments import guess, number, put, typed
from pycomm.codecs import Cast, Codec, Lossless, options

Kind = Literal["residual", "decay", "momentum"]
StorageName = Literal["float32", "int8", "auto"]

LARGE = 1 << 16
"""Number of values from which "auto" keeps a parameter's residual in int8."""

EXACT = Cast("float32")

_DECAY = {"residual": 0.0, "decay": 0.95, "momentum": 0.9}


@dataclass(frozen=True)
class Feedback:
    """Configuration of error feedback; docs/feedback.md has the formulas.

    Example:
        >>> from pycomm.feedback import Feedback
        >>> Feedback.of("decay:0.9,storage=int8")
        Feedback(kind='decay', decay=0.9, storage='int8')
        >>> print(Feedback.of("momentum"))
        momentum:decay=0.9,storage=auto
    """

    kind: Kind = "residual"
    """residual: the whole error is added to the next payload (Seide et al. 2014). decay: a share of
    the error is added, and the rest forgotten (SparseLoCo, Sarfi et al. 2025). momentum: momentum
    is kept here and not in the optimizer (DGC, Lin et al. 2018)."""
    decay: float = -1.0
    """decay: share of the error that is added. momentum: its coefficient. Below 0: the default of
    the kind, 0.95 and 0.9."""
    storage: StorageName = "auto"
    """The format in which residuals are kept; int8 has a scale for each 32 values. auto: as int8
    for parameters of 65536 values or more and the kinds residual and decay; else float32, as where
    a payload has few of the values: the others wait for hundreds of steps, and a narrower format
    rounds away what a step adds to that many."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = get_args(Kind)
            meant = guess(str(self.kind), kinds)
            raise ValueError(
                f"unknown feedback {self.kind!r}: {meant}use one of {', '.join(kinds)}"
            )
        if self.storage not in get_args(StorageName):
            names = get_args(StorageName)
            raise ValueError(
                f"feedback: storage={self.storage!r}: {guess(str(self.storage), names)}use one of "
                f"{', '.join(names)}"
            )
        put(self, decay=number("feedback: decay", self.decay))
        if self.decay < 0:
            object.__setattr__(self, "decay", _DECAY[self.kind])
        if not 0 <= self.decay < 1:
            raise ValueError(f"feedback: decay={self.decay}: use 0 or more, and less than 1")
        if self.decay and self.kind == "residual":
            raise ValueError("feedback: residual has no decay: leave it out, or use the kind decay")

    def __str__(self) -> str:
        """Return the text from which `of` makes an equal object."""
        names = ("decay", "storage") if self.kind != "residual" else ("storage",)
        options = [f"{name}={getattr(self, name)}" for name in names]
        return f"{self.kind}:{','.join(options)}"

    def kept(self, numel: int, codec: Codec | None = None) -> Feedback:
        """Return the same with a storage that is not "auto", for a parameter of so many values."""
        if self.storage != "auto":
            return self
        sparse = codec is not None and codec.combine == "gather"
        wide = numel < LARGE or self.kind == "momentum" or sparse
        return replace(self, storage="float32" if wide else "int8")

    def keeps_errors(self, codec: Codec) -> bool:
        """Return whether the error of this codec's payloads is kept for the next payload.

        An exact codec has no error. The error of an unbiased codec is not kept either, except with
        momentum, whose state is more than an error.
        """
        return codec not in (EXACT, Lossless()) and (not codec.unbiased or self.kind == "momentum")

    @classmethod
    def of(cls, what: bool | str | Feedback | None) -> Feedback | None:
        """Return the feedback for an argument; None: no feedback.

        Args:
            what: True: residual; False or None: none; a text, ``kind:option=value,option=value``,
                where the first option may be ``decay`` by its value alone; or a `Feedback`.

        Raises:
            TypeError: another type; a number alone is ambiguous.
            ValueError: an unknown kind or option, with the list of known ones, or a bad value.
        """
        if isinstance(what, Feedback):
            return what
        typed("feedback", what, bool, str, Feedback, None)
        if not isinstance(what, str):
            return cls() if what else None
        kind, _, rest = what.partition(":")
        given = [option for option in rest.split(",") if option]
        found = options("feedback", {"decay": float, "storage": str}, given)
        return cls(kind, **found)  # type: ignore[arg-type]  # __post_init__ checks it
