"""Format of link rates, for one node or for all.

| text | meaning |
| --- | --- |
| `1gbit` | what a node sends, and what it receives, each at 1 Gbit/s (as `tc` writes it) |
| `unlimited` | no limit |
| `100mbit/1gbit` | it sends at 100 Mbit/s and receives at 1 Gbit/s |
| `1gbit,200mbit` | two links, each with an interface of its own: eth0 and eth1 |
| `200mbit@60ms@0.1%` | of all nodes: a round trip, and a share of packets that are lost |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pycomm.units import parse_rate

UNLIMITED = "unlimited"
_RATE = re.compile(r"\d+(\.\d+)?[kmgt]?bit")


@dataclass(frozen=True)
class Rate:
    """The rate of one link, both ways, as texts for `tc`; None: no limit."""

    sent: str | None
    received: str | None


def parse(text: str) -> list[Rate]:
    """Return the rate of each link.

    Raises:
        ValueError: the text has another form; the message shows a valid one.
    """
    return [_link(part) for part in text.split(",")]


def _link(text: str) -> Rate:
    sent, slash, received = text.partition("/")
    return Rate(_one_way(sent), _one_way(received if slash else sent))


def _one_way(text: str) -> str | None:
    if text == UNLIMITED:
        return None
    if not _RATE.fullmatch(text):
        raise ValueError(
            f"cannot read the rate {text!r}: want 200mbit, 1gbit, unlimited, or two of them "
            "for sending and receiving, such as 100mbit/1gbit"
        )
    parse_rate(text)  # which refuses 0
    return text


def bytes_per_second(text: str) -> float:
    """Return the bytes per second that a node sends on its first link; 0: there is no limit.

    Raises:
        ValueError: as of `parse`.
    """
    sent = parse(text)[0].sent
    return 0.0 if sent is None else parse_rate(sent)[0]
