"""Registry of codecs, and their text form: "int8", "quant:bits=4,block=64", "cast:float16"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pycomm import _C
from pycomm.arguments import guess, typed
from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.cast import Cast
from pycomm.codecs.cuda.sources import has_kernels
from pycomm.codecs.eden import Eden
from pycomm.codecs.implementations import Unavailable
from pycomm.codecs.lossless import Lossless
from pycomm.codecs.mx import MX
from pycomm.codecs.quant import Quant
from pycomm.codecs.sign import Sign
from pycomm.codecs.topk import TopK

__all__ = [
    "ALIASES",
    "CODECS",
    "MX",
    "Cast",
    "Codec",
    "Eden",
    "Lossless",
    "Quant",
    "RandomKey",
    "Sign",
    "TopK",
    "Unavailable",
    "codec",
    "register",
    "short_text",
]


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

# Short names, which may be followed by more options: "int4:block=64". The table is the core's.
ALIASES: dict[str, str] = _C.codec_aliases()

_registered: dict[str, type[Codec]] = {}
_Class = TypeVar("_Class", bound=type[Codec])


def register(cls: _Class) -> _Class:
    """Make a codec of your own known by its name, to hooks, policies and `codec`; a decorator.

    Its reference runs, in plain torch, on every device and with every process group; payloads
    travel by the group's all-to-all and all-gather. Register it on all ranks before `compress`, and
    before a checkpoint that names it is loaded.

    Args:
        cls: a frozen dataclass below `Codec`, with `name`, `combine` ("recode" or "gather"),
            `wire_version` and what is abstract there.

    Returns:
        The class.

    Raises:
        TypeError: it is no such class.
        ValueError: its name is taken, or is none that a codec's text can begin with.

    Example:
        >>> import pycomm
        >>> @pycomm.codecs.register  # doctest: +SKIP
        ... @dataclass(frozen=True)
        ... class Half(pycomm.codecs.Codec): ...
        >>> pycomm.compress(model, "half")  # doctest: +SKIP
    """
    if not (isinstance(cls, type) and issubclass(cls, Codec)):
        raise TypeError(f"register takes a class below pycomm.codecs.Codec, not {cls!r}")
    if missing := sorted(cls.__abstractmethods__):
        raise TypeError(f"{cls.__name__} does not define {', '.join(missing)}")
    parameters = cls.__dict__.get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{cls.__name__} is no frozen dataclass: write @dataclass(frozen=True)")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{cls.__name__}.name is {name!r}: want small letters, digits and _")
    if getattr(cls, "combine", None) not in ("recode", "gather"):
        raise ValueError(f'{cls.__name__}.combine must be "recode" or "gather"')
    if not isinstance(getattr(cls, "wire_version", None), int):
        raise TypeError(f"{cls.__name__}.wire_version must be a whole number")
    other = CODECS.get(name) or _registered.get(name)
    again = other is not None and (other.__module__, other.__qualname__) == (
        cls.__module__,
        cls.__qualname__,  # as where a notebook's cell runs twice
    )
    kernels = other is None and has_kernels(name)  # of no codec, such as those of convert()
    if name in ("auto", *ALIASES) or kernels or (other is not None and not again):
        raise ValueError(f"there is a codec {name!r} already: give {cls.__name__} another name")
    _registered[name] = cls
    short_text.cache_clear()
    return cls


@cache
def short_text(of: Codec) -> str:
    """Return the shortest text by which `codec` returns an equal codec: "int4:block=64"."""
    cls = type(of)
    aliases = [name for name, text in ALIASES.items() if text.partition(":")[0] == cls.name]
    best: tuple[int, str] | None = None
    for name in (*aliases, cls.name):
        given = ALIASES.get(name, "").partition(":")[2].partition("=")[0]
        try:
            usual = codec(name)
        except (TypeError, ValueError):  # an option has no default
            continue
        options = {
            field.name: getattr(of, field.name)
            for field in fields(of)
            if getattr(of, field.name) != getattr(usual, field.name)
        }
        if given in options or any(value in (0, "") for value in options.values()):
            continue
        if best is None or len(options) < best[0]:
            first = fields(of)[0].name if name == cls.name and fields(of) else ""
            shown = options
            if isinstance(getattr(of, first, None), (int, float)):  # how much it keeps
                shown = {first: getattr(of, first), **options}
            listed = ",".join(f"{option}={value}" for option, value in shown.items())
            best = len(options), f"{name}:{listed}" if listed else name
    return best[1] if best else of.spec()


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
    cls = CODECS.get(name) or _registered.get(name)
    if cls is None:
        if name == "powersgd":
            raise ValueError(
                "codec powersgd is not a part of pycomm any more: register torch's powerSGD_hook "
                "(torch.distributed.algorithms.ddp_comm_hooks) with a DDP model in a group of "
                'init_process_group("pycomm")'
            )
        known = sorted([*CODECS, *ALIASES, *_registered])
        meant = guess(name, known)
        the = f"{meant}The" if meant else "the"
        raise ValueError(f"unknown codec {name!r}: {the} codecs are {', '.join(known)}")
    return cls(**options(name, _hints(cls), given))


def options(name: str, hints: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """Return the values of options, the first of which may be given by its value alone.

    Args:
        name: of what has the options.
        hints: their types by name, in order.
        given: texts, "option=value".

    Raises:
        ValueError: an unknown option, one that is given twice, or no value that it can have.
    """
    known = list(hints)
    listed = f"{name} has the options {', '.join(known)}" if known else f"{name} has no options"
    found: dict[str, Any] = {}
    for place, item in enumerate(given):
        option, equals, value = item.partition("=")
        if not equals:
            if place > 0 or not known:
                raise ValueError(f"{name}: write {item!r} as option=value; {listed}")
            option, value = known[0], item
        if option not in known:
            meant = guess(option, known)
            raise ValueError(f"{name}: unknown option {option!r}; {meant}{listed}")
        if option in found:
            raise ValueError(f"{name}: {option} is given twice: leave one out")
        found[option] = _convert(name, option, value, hints[option])
    return found


@cache
def _hints(cls: type[Codec]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


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
