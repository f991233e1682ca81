"""Format of link rates, for one node or for all.

| text | meaning |
| --- | --- |
| `1gbit` | what a node sends, and what it receives, each at 1 Gbit/s (as `tc` writes it) |
| `unlimited` | no limit |
| `100mbit/1gbit` | it sends at 100 Mbit/s and receives at 1 Gbit/s |
| `1gbit 30s:100mbit 60s:1gbit` | another rate from 30 seconds on, and from 60 |
| `1gbit,200mbit` | two links, each with an interface of its own: eth0 and eth1 |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNLIMITED = "unlimited"
_RATE = re.compile(r"\d+(\.\d+)?[kmgt]?(bit|bps)")


@dataclass(frozen=True)
class Rate:
    """The rate of one link, both ways, from a time on, as texts for `tc`; None: no limit."""

    since: float
    """seconds since the start of the first ranks"""
    sent: str | None
    received: str | None


def parse(text: str) -> list[list[Rate]]:
    """Return the rates of each link in order of time, the first from the start on.

    Raises:
        ValueError: the text has another form; the message shows a valid one.
    """
    return [_link(part) for part in text.split(",")]


def _link(text: str) -> list[Rate]:
    first, *later = text.split() or [""]
    rates = [_from(0.0, first.removeprefix("0s:"))]
    for entry in later:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)s:(.+)", entry)
        if not found or float(found[1]) <= rates[-1].since:
            raise ValueError(
                f"cannot read {entry!r} in the rate {text!r}: want a later time and a rate, "
                "such as 30s:100mbit"
            )
        rates.append(_from(float(found[1]), found[2]))
    return rates


def _from(since: float, text: str) -> Rate:
    sent, slash, received = text.partition("/")
    return Rate(since, _one_way(sent), _one_way(received if slash else sent))


def _one_way(text: str) -> str | None:
    if text == UNLIMITED:
        return None
    if not _RATE.fullmatch(text):
        raise ValueError(
            f"cannot read the rate {text!r}: want 200mbit, 1gbit, unlimited, or two of them "
            "for sending and receiving, such as 100mbit/1gbit"
        )
    return text
