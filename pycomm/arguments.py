"""Checks of arguments, which raise at the call, before anything is sent or changed."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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


def deprecated_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that passes an argument on by its new name and warns of the old one.

    Args:
        old: the deprecated name; it is accepted as a keyword only.
        new: the name in the function's signature.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        place = list(inspect.signature(function).parameters).index(new)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                name = function.__name__
                if new in kwargs or len(args) > place:
                    raise TypeError(f"{name}: {new}= and {old}= were both given: use {new}= alone")
                warn_deprecated(f"{name}({old}=...)", f"{name}({new}=...)", stacklevel=3)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Issue the DeprecationWarning of a renamed public name.

    Args:
        old: the deprecated name.
        new: the name to use instead.
        stacklevel: number of frames up to the user's line; 3 if the renamed function calls this.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in the next release: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
