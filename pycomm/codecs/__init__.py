"""Registry of codecs, and their text form: "int8", "quant:bits=4,block=64", "cast:float16"."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from typing import Any, get_type_hints

from pycomm.arguments import typed
from pycomm.codecs import implementations
from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.cast import Cast
from pycomm.codecs.eden import Eden
from pycomm.codecs.implementations import Unavailable
from pycomm.codecs.lossless import Lossless
from pycomm.codecs.mx import MX
from pycomm.codecs.powersgd import PowerSGD
from pycomm.codecs.quant import Quant
from pycomm.codecs.sign import Sign
from pycomm.codecs.topk import TopK

__all__ = [
    "ALIASES",
    "CODECS",
    "MX",
    "SCHEMES",
    "Cast",
    "Codec",
    "Eden",
    "Lossless",
    "PowerSGD",
    "Quant",
    "RandomKey",
    "Sign",
    "TopK",
    "Unavailable",
    "codec",
]


def _nvrtc() -> implementations.Implementation:
    """Import CuPy only when a codec first needs it, since it may be missing."""
    from pycomm.codecs.cuda import nvrtc

    return nvrtc


implementations.nvrtc = _nvrtc

# The only list of codecs in Python, one line each.
CODECS: dict[str, type[Codec]] = {
    "cast": Cast,
    "eden": Eden,
    "lossless": Lossless,
    "mx": MX,
    "quant": Quant,
    "sign": Sign,
    "topk": TopK,
}

# Codecs whose ranks combine payloads by collectives of their own (combine "factors"): a hook runs
# them, in torch, and there is no other implementation.
SCHEMES: dict[str, type[Codec]] = {
    "powersgd": PowerSGD,
}

# Short names, which may be followed by more options: "int4:block=64".
ALIASES: dict[str, str] = {
    "int8": "quant:bits=8",
    "int7": "quant:bits=7",
    "int6": "quant:bits=6",
    "int5": "quant:bits=5",
    "int4": "quant:bits=4",
    "int3": "quant:bits=3",
    "int2": "quant:bits=2",
    "none": "cast:dtype=float32",
    "fp32": "cast:dtype=float32",
    "fp16": "cast:dtype=float16",
    "bf16": "cast:dtype=bfloat16",
    "fp8": "cast:dtype=float8_e4m3",
    "fp8_e4m3": "cast:dtype=float8_e4m3",
    "fp8_e5m2": "cast:dtype=float8_e5m2",
    "mxfp8": "mx:format=fp8_e4m3",
    "mxfp8_e5m2": "mx:format=fp8_e5m2",
    "mxfp6": "mx:format=fp6_e2m3",
    "mxfp6_e3m2": "mx:format=fp6_e3m2",
    "mxfp4": "mx:format=fp4_e2m1",
    "nvfp4": "mx:format=nvfp4",
    "drive": "eden:bits=1",
    "eden2": "eden:bits=2",
}


def codec(text: str | Codec) -> Codec:
    """Return the codec that a text describes; a codec is returned unchanged.

    The text is a name or short name, then options: ``name:option=value,option=value``. The first
    option may be given by its value alone. Options are the fields of the codec's dataclass.

    Raises:
        TypeError: neither a text nor a codec.
        ValueError: an unknown name or option, with the list of known ones, or an invalid value.

    Example:
        >>> import pycomm
        >>> pycomm.codec("int4:block=64").spec()
        'quant:bits=4,block=64,rounding=nearest'
        >>> pycomm.codec("cast:bfloat16").encoded_bytes(1000)
        2000
    """
    if isinstance(text, Codec):
        return text
    typed("codec", text, str, Codec)
    name, _, rest = text.partition(":")
    given = [option for option in rest.split(",") if option]
    if name in ALIASES:
        name, _, first = ALIASES[name].partition(":")
        given.insert(0, first)
    cls = CODECS.get(name) or SCHEMES.get(name)
    if cls is None:
        known = sorted([*CODECS, *SCHEMES, *ALIASES])
        near = get_close_matches(name.lower(), known, 1)
        guess = f"did you mean {near[0]!r}? The" if near else "the"
        raise ValueError(f"unknown codec {name!r}: {guess} codecs are {', '.join(known)}")
    return cls(**_options(name, cls, given))


def _options(name: str, cls: type[Codec], given: list[str]) -> dict[str, Any]:
    hints = _hints(cls)
    known = [field.name for field in fields(cls)]
    listed = f"{name} has the options {', '.join(known)}" if known else f"{name} has no options"
    options: dict[str, Any] = {}
    for place, item in enumerate(given):
        option, equals, value = item.partition("=")
        if not equals:
            if place > 0 or not known:
                raise ValueError(f"{name}: write {item!r} as option=value; {listed}")
            option, value = known[0], item
        if option not in known:
            raise ValueError(f"{name}: unknown option {option!r}; {listed}")
        if option in options:
            raise ValueError(f"{name}: {option} is given twice: leave one out")
        options[option] = _convert(name, option, value, hints[option])
    return options


@cache
def _hints(cls: type[Codec]) -> dict[str, Any]:
    return get_type_hints(cls)


def _convert(name: str, option: str, value: str, hint: Any) -> Any:
    if hint not in (int, float):
        return value
    try:
        return int(value) if hint is int else _number(value)
    except ValueError:
        words = {int: "an integer", float: "a number"}
        raise ValueError(f"{name}: {option}={value!r} is not {words[hint]}") from None


def _number(text: str) -> float:
    """Return the float64 nearest to a decimal number, whatever the thread's rounding mode.

    float() computes in floats and so follows the thread's rounding mode: ranks with different modes
    would have different densities. Python divides integers that no float64 holds by integer
    arithmetic alone.
    """
    value = float(text)
    if not 1e-300 < abs(value) < 1e300:
        return value
    numerator, denominator = Fraction(text).as_integer_ratio()
    return (numerator << 64) / (denominator << 64)
