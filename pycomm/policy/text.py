"""Policies as text, for command lines: "int4", "auto error=0.3", "fp32 100:int8"."""

from __future__ import annotations

import re
from typing import Any

_TURN = re.compile(r"(epoch)?(\d+):(.+)")
DGC = "dgc"
_NUMBERS = ("warmup", "error")
_WORDS = "warmup=, error=, guard=off, factors=off, STEP:CODEC or epochN:CODEC"


def options(text: str) -> dict[str, Any]:
    """Return a policy's options from its text; see `Policy.of`.

    Raises:
        ValueError: a word is unknown, or is given twice.
    """
    words = text.split()
    if not words:
        raise ValueError('policy: the text is empty; give a codec, such as "int8"')
    name, _, density = words[0].partition(":")
    if name == DGC:
        words[:1] = [f"topk:{density or '0.001'}", "warmup=dgc"]
    found: dict[str, Any] = {}
    if words[0].partition("=")[0] not in _NUMBERS:
        found["codec"] = words.pop(0)
    for word in words:
        turn = _TURN.fullmatch(word)
        name, _, value = word.partition("=")
        if turn:
            kind = "epochs" if turn[1] else "schedule"
            found[kind] = (*found.get(kind, ()), (int(turn[2]), turn[3]))
        elif name in found:
            raise ValueError(f"policy: {name} is given twice in {text!r}")
        elif name in _NUMBERS:
            found[name] = value if value == "dgc" and name == "warmup" else _number(name, value)
        elif word == "guard=off":
            found["guard"] = None
        elif word == "factors=off":
            found["factors"] = False
        else:
            raise ValueError(f"policy: {word!r} in {text!r} is none of {_WORDS}")
    return found


def usual_feedback(text: str) -> str | None:
    """Return the feedback of a method that the text names, such as "dgc"; None: no such method.

    "dgc:0.01" is Deep Gradient Compression (Lin et al. 2018): the largest values are sent, a share
    that falls in the first epochs, and momentum is kept here and not in the optimizer.
    """
    first = text.split() or [""]
    return "momentum:0.9" if first[0].partition(":")[0] == DGC else None


def _number(name: str, value: str) -> int | float:
    try:
        return int(value) if name == "warmup" else float(value)
    except ValueError:
        raise ValueError(f"policy: {name}={value!r} is not a number") from None
