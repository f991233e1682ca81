"""What a user says about feedback, as data, and its text: "ema:0.9,storage=int8"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pycomm.codecs import Cast, Codec

Kind = Literal["residual", "ema", "momentum", "ef21"]
StorageName = Literal["float32", "bf16", "int8"]

EXACT = Cast("float32")

_DECAY = {"residual": 0.0, "ema": 0.8, "momentum": 0.9, "ef21": 0.0}


@dataclass(frozen=True)
class Feedback:
    """What a rank does with the error of what it sends. docs/feedback.md has the formulas.

    Example:
        >>> from pycomm.feedback import Feedback
        >>> Feedback.of("ema:0.9,storage=int8")
        Feedback(kind='ema', decay=0.9, storage='int8', reset=0, clip=0.0, nesterov=False)
        >>> print(Feedback.of("momentum:clip=1"))
        momentum:decay=0.9,storage=float32,clip=1.0
    """

    kind: Kind = "residual"
    """residual: all of it is added to the next payload (Seide et al. 2014). ema: a moving average
    of it (LoCo, Xie et al. 2024). momentum: momentum is kept here and not in the optimizer (DGC,
    Lin et al. 2018). ef21: differences to what was sent before travel (Richtarik et al. 2021)."""
    decay: float = -1.0
    """ema: share of the old average that is kept. momentum: its coefficient. Below 0: the default
    of the kind, 0.8 and 0.9."""
    storage: StorageName = "float32"
    """How residuals are kept; int8 has a scale for each 32 values."""
    reset: int = 0
    """ema: every so many steps the average starts from zero; 0: never."""
    clip: float = 0.0
    """momentum: bound of each gradient's L2 norm times sqrt(ranks) before it is added; 0: none."""
    nesterov: bool = False
    """momentum: Nesterov's."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"unknown feedback {self.kind!r}: use one of {', '.join(get_args(Kind))}"
            )
        if self.storage not in get_args(StorageName):
            raise ValueError(
                f"feedback: storage={self.storage!r}: use one of {', '.join(get_args(StorageName))}"
            )
        if self.decay < 0:
            object.__setattr__(self, "decay", _DECAY[self.kind])
        if not 0 <= self.decay < 1:
            raise ValueError(f"feedback: decay={self.decay} is not in [0, 1)")
        if self.decay and self.kind not in ("ema", "momentum"):
            raise ValueError(f"feedback: {self.kind} has no decay")
        if self.reset < 0 or (self.reset and self.kind != "ema"):
            raise ValueError("feedback: reset is a number of steps, and only ema has it")
        if self.clip < 0 or ((self.clip or self.nesterov) and self.kind != "momentum"):
            raise ValueError("feedback: clip and nesterov belong to momentum; clip is not negative")
        if self.kind == "ef21" and self.storage != "float32":
            # What was sent must be known exactly, else ranks drift from their mean for good.
            raise ValueError("feedback: ef21 is kept in float32 only")

    def __str__(self) -> str:
        """Return the text from which `of` makes the same."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)[1:]]
        options = [f"{k}={str(v).lower() if v is True else v}" for k, v in given if v]
        return f"{self.kind}:{','.join(options)}"

    def keeps_errors(self, codec: Codec) -> bool:
        """Whether what a payload of this codec leaves out is kept for the next.

        Not if nothing is left out, and not if the codec is unbiased, unless what is kept is more
        than an error.
        """
        return codec != EXACT and not (codec.unbiased and self.kind in ("residual", "ema"))

    @classmethod
    def of(cls, what: bool | str | Feedback | None) -> Feedback | None:
        """Return the feedback that an argument asks for; None for none.

        Args:
            what: True: residual; False or None: none; a text, ``kind:option=value,option=value``,
                where the first option may be ``decay`` by its value alone; or a `Feedback`.

        Raises:
            ValueError: an unknown kind or option, with the list of known ones, or a bad value.
        """
        if isinstance(what, Feedback):
            return what
        if not isinstance(what, str):
            return cls() if what else None
        kind, _, rest = what.partition(":")
        options: dict[str, Any] = {}
        for place, item in enumerate(option for option in rest.split(",") if option):
            option, equals, value = item.partition("=")
            if not equals and place == 0:
                option, value = "decay", item
            options[option] = _value(option, value)
        return cls(kind, **options)  # type: ignore[arg-type]  # __post_init__ checks it


_TYPES: dict[str, Callable[[str], Any]] = {
    "decay": float,
    "storage": str,
    "reset": int,
    "clip": float,
    "nesterov": {"true": True, "false": False}.__getitem__,
}


def _value(option: str, text: str) -> Any:
    if option not in _TYPES:
        raise ValueError(f"feedback: unknown option {option!r}; it has {', '.join(_TYPES)}")
    try:
        return _TYPES[option](text)
    except (ValueError, KeyError):
        raise ValueError(f"feedback: {option}={text!r} is not a value it can have") from None
