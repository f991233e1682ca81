"""Policies as text, for command lines: "int4", "auto error=0.3", "fp32 100:int8"."""

from __future__ import annotations

import re
from typing import Any

_TURN = re.compile(r"(\d+):(.+)")
_NUMBERS = ("warmup", "error")
_WORDS = "warmup=, error=, guard=off, factors=off, STEP:CODEC"


def options(text: str) -> dict[str, Any]:
    """Return a policy's options from its text; see `Policy.of`.

    Raises:
        ValueError: a word is unknown, or is given twice.
    """
    words = text.split()
    if not words:
        raise ValueError('policy: the text is empty; give a codec, such as "int8"')
    found: dict[str, Any] = {}
    if words[0].partition("=")[0] not in _NUMBERS:
        found["codec"] = words.pop(0)
    for word in words:
        turn = _TURN.fullmatch(word)
        name, _, value = word.partition("=")
        if turn:
            found["schedule"] = (*found.get("schedule", ()), (int(turn[1]), turn[2]))
        elif name in found:
            raise ValueError(f"policy: {name} is given twice in {text!r}")
        elif name in _NUMBERS:
            found[name] = _number(name, value)
        elif word == "guard=off":
            found["guard"] = None
        elif word == "factors=off":
            found["factors"] = False
        else:
            raise ValueError(f"policy: {word!r} in {text!r} is none of {_WORDS}")
    return found


def _number(name: str, value: str) -> int | float:
    try:
        return int(value) if name == "warmup" else float(value)
    except ValueError:
        raise ValueError(f"policy: {name}={value!r} is not a number") from None
