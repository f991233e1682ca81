"""Checks of arguments, which raise at the call, before anything is sent or changed."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def typed(what: str, value: Any, *types: type | None) -> None:
    """Check that an argument is of one of these types.

    Args:
        what: the argument's name.
        value: the argument.
        types: the accepted types; None stands for None itself.

    Raises:
        TypeError: it has none of the types; a bool never counts as a number.
    """
    kinds = tuple(type(None) if kind is None else kind for kind in types)
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    names = " or ".join("None" if kind is None else kind.__name__ for kind in types)
    raise TypeError(f"{what}={value!r} is of type {type(value).__name__}: want {names}")


def guess(word: str, known: Iterable[str]) -> str:
    """Return a question for an error, "did you mean 'int4'? ", or "" if no known word is alike."""
    near = nearest(word, known)
    return f"did you mean {near!r}? " if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most alike, whatever its case; "" if none is."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, 1)
    return names[near[0]] if near else ""


def whole(what: str, value: Any, least: float = 0, most: float = math.inf) -> int:
    """Return a whole number, such as one of numpy, as an int.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below `least` or above `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        typed(what, value, int)
    found: int = operator.index(value)
    if not least <= found <= most:
        bounds = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{what}={value} is invalid: expected a whole number, {bounds}")
    return found


def number(what: str, value: Any) -> int | float:
    """Return a finite number, such as one of numpy, as an int or a float.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        typed(what, value, int, float)
    plain: int | float = operator.index(value) if isinstance(value, Integral) else float(value)
    if not math.isfinite(plain):
        raise ValueError(f"{what}={value} is not a finite number")
    return plain


def put(instance: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass, as its ``__post_init__`` may."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
