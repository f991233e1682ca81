"""Delay and loss of the links between nodes, as netlab takes them.

| option | meaning |
| --- | --- |
| `--delay 30ms` | each packet travels for 30 ms one way (60 ms both ways); `us`, `ms` or `s` |
| `--loss 0.1%` | a packet is lost with this probability, each by itself; `0.001` is the same |
| `--matrix FILE` | links of pairs of nodes that differ, a line each |

A line of the matrix names the nodes, `0-1` for both ways or `0>1` for one, `*` for every node, and
what differs: `0-1 delay=5ms`, `2>* loss=1% rate=20mbit`. Later lines count more than earlier ones;
`#` begins a comment. `rate` limits the pair's own link, beside what each node may send and receive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pycomm import units
from pycomm.bench.lab import rates

_LONGEST = 60.0  # seconds: a longer delay is a mistake


@dataclass(frozen=True)
class Shape:
    """Treatment of the packets from one node to another."""

    delay: float = 0.0
    """seconds, one way"""
    loss: float = 0.0
    rate: float = 0.0
    """bits per second; 0: no limit of its own"""


def seconds(name: str, text: str) -> float:
    """Parse "30ms".

    Raises:
        ValueError: it is no such time, or one that no link has.
    """
    if not re.fullmatch(r"0|[\d.]+(us|ms|s)", text):
        raise ValueError(f"cannot read the {name} {text!r}: want a time with a unit, such as 30ms")
    time = units.parse_time(text)
    if time > _LONGEST:
        raise ValueError(f"the {name} {text} is impossible: want 0 to {_LONGEST:.0f}s")
    return time


def share(name: str, text: str) -> float:
    """Parse "0.1%" or "0.001".

    Raises:
        ValueError: it is no number, or outside of 0 to 100 %.
    """
    try:
        return units.parse_share(text)
    except ValueError:
        raise ValueError(f"the {name} {text} is no share: want 0% to 100%, such as 0.1%") from None


def bits(text: str | None) -> float:
    """Return the bits per second of a rate as tc writes it; 0 for none."""
    return 0.0 if text is None else 8 * units.parse_rate(text)[0]


def changed(shape: Shape, words: Mapping[str, str]) -> Shape:
    """Return the shape with the values that the words name.

    Raises:
        ValueError: an unknown word or an impossible value.
    """
    for name, text in words.items():
        if name == "delay":
            value = seconds(name, text)
        elif name == "loss":
            value = share(name, text)
        elif name == "rate":
            value = 0.0 if text == rates.UNLIMITED else bits(text)
        else:
            raise ValueError(f"a link has no {name!r}: want delay, loss or rate")
        shape = replace(shape, **{name: value})
    return shape


def matrix(nodes: int, shape: Shape, text: str = "") -> dict[tuple[int, int], Shape]:
    """Return the shape of every ordered pair of nodes.

    Args:
        nodes: how many there are.
        shape: of all pairs that the text does not name.
        text: lines of a matrix file.

    Raises:
        ValueError: a line that cannot be read, with its number.
    """
    pairs = {(i, j): shape for i in range(nodes) for j in range(nodes) if i != j}
    for number, line in enumerate(text.splitlines(), 1):
        where, *words = line.partition("#")[0].split() or [""]
        if not where:
            continue
        found = re.fullmatch(r"(\d+|\*)([->])(\d+|\*)", where)
        if not found or not words or not all("=" in word for word in words):
            raise ValueError(
                f"matrix, line {number}: cannot read {line.strip()!r}: want such as "
                "0-1 delay=5ms loss=0.1%"
            )
        ends = found[1], found[3]
        for end in ends:
            if end != "*" and int(end) >= nodes:
                raise ValueError(
                    f"matrix, line {number}: no node {end}: the nodes are 0 to {nodes - 1}"
                )
        try:
            values = dict(word.split("=", 1) for word in words)
            for pair, old in pairs.items():
                both = (pair, pair[::-1]) if found[2] == "-" else (pair,)
                if any(_fits(ends, way) for way in both):
                    pairs[pair] = changed(old, values)
        except ValueError as error:
            raise ValueError(f"matrix, line {number}: {error}") from None
    return pairs


def _fits(ends: tuple[str, str], pair: tuple[int, int]) -> bool:
    return all(end in ("*", str(node)) for end, node in zip(ends, pair, strict=True))
