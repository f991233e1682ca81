"""Formulas for the time of one all-reduce, for each algorithm of docs/algorithms.md.

They assume n equal ranks and b bytes, and count what the busiest rank does: `rounds` that wait for
each other, `messages` and bytes `sent` by it, bytes that leave its node (`crossed`), seconds of its
processor. Where segments let a link and a processor overlap, the longer of the two counts in full
and the shorter one for a segment: the first, before the other can start, or the last, after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pycomm.plan.cluster import Cluster, Link
from pycomm.plan.codecs import NONE, Coding

STAGE = 1 << 20
"""Bytes of a stage of the exact hierarchical all-reduce, and of a segment of the coded one."""

EXACT = ("one_shot", "two_shot", "bruck")
"""Those that `auto` chooses from without a codec: they keep rank order."""


class Cost(NamedTuple):
    """Cost of an all-reduce of one bucket."""

    seconds: float
    """Time from the call to its end."""
    wire: float
    """Time of the busiest link, a lower bound of `seconds`."""
    processor: float
    """Core time of each rank, in seconds."""
    sent: float
    """Bytes that a rank sends."""
    latency: float
    """Part of `seconds` that no number of bytes changes: dependent rounds, and messages."""

    def plus(self, other: Cost, times: int = 1) -> Cost:
        """Return the cost of this and of `times` others, one after the other."""
        return Cost(*(mine + times * each for mine, each in zip(self, other, strict=True)))


NOTHING = Cost(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Size:
    """Size of the data of one all-reduce."""

    values: int
    payload: float
    """Bytes of all payloads, counted once."""
    value_bytes: int = 4
    """Bytes of a value that ranks of a node exchange: codecs work on float32."""

    @property
    def plain(self) -> float:
        """Bytes inside a node, where nothing is encoded."""
        return float(self.values * self.value_bytes)

    def part(self, count: int) -> Size:
        """Return the size of one of `count` equal parts."""
        return Size(max(1, self.values // count), self.payload / count, self.value_bytes)

    @classmethod
    def of(cls, values: int, coding: Coding, exact: int = 0, value_bytes: int = 4) -> Size:
        """Return the size of `values`, of which `exact` (in 1-d tensors) are not compressed."""
        if coding.exact:
            return cls(values, float(values * value_bytes), value_bytes)
        return cls(values, (values - exact) * coding.payload + exact * value_bytes)


def algorithms(cluster: Cluster, coding: Coding) -> tuple[str, ...]:
    """Return the algorithms that pycomm's `auto` chooses from for a codec on this cluster."""
    if cluster.levels:
        return ("hierarchical",)
    if coding.exact:
        return EXACT
    way = "gather" if coding.combine == "gather" else "two_shot"
    return ("one_shot", way) if in_one_shot(coding, cluster.slowest) else (way,)


def in_one_shot(coding: Coding, link: Link) -> bool:
    """Return whether a coded all-reduce may take one round in place of two (`coded.cpp`): between
    far ranks, with a codec without feedback."""
    return coding.combine == "recode" and not coding.feedback and link.far


def steps(algorithm: str, n: int, payload: float) -> tuple[float, float, float, float]:
    """Return the busiest rank's rounds, messages, bytes sent and bytes folded; see `dispatch.cpp`.

    Raises:
        KeyError: the algorithm is one for other levels or codecs.
    """
    others, doublings = n - 1, math.ceil(math.log2(n)) if n > 1 else 0
    if algorithm == "one_shot":
        return 1, others, others * payload, n * payload
    if algorithm == "two_shot":
        return 2, 2 * others, 2 * others / n * payload, payload
    if algorithm == "bruck":
        return doublings, doublings, others * payload, (n + 1) * payload
    raise KeyError(algorithm)


def all_reduce(cluster: Cluster, coding: Coding, algorithm: str, size: Size) -> Cost:
    """Predict one all-reduce.

    Raises:
        KeyError: the codec has no such algorithm.
    """
    if cluster.ranks == 1:
        return NOTHING
    cluster = cluster.holding(size.values)
    if algorithm == "hierarchical":
        return _hierarchical(cluster, coding, size)
    n, local = cluster.ranks, cluster.ranks_per_node
    # How many times a rank's data crosses the link that the ranks of a node share.
    cross = local * (n - local) / (n - 1) if cluster.nodes > 1 else 1.0
    return _flat(cluster, cluster.slowest, n, coding, algorithm, size, cross)


def _flat(
    cluster: Cluster,
    link: Link,
    n: int,
    coding: Coding,
    algorithm: str,
    size: Size,
    cross: float = 1.0,
) -> Cost:
    """Predict an all-reduce among n ranks over one kind of link."""
    known = "one_shot" if algorithm == "gather" else algorithm
    rounds, messages, sent, folded = steps(known, n, size.payload)
    if known == "two_shot":  # each chunk is sent in segments
        messages *= max(1, round(size.values * 4 / n / link.segment))
    moving = messages * link.message + sent * link.byte
    if coding.exact:
        work = folded / cluster.processor.memory
    else:
        work = coding_seconds(cluster, coding, n, size.values, everywhere=algorithm == "one_shot")
    waiting = rounds * (link.latency + link.late(n - 1))
    latency = waiting + messages * link.message * cluster.slowdown
    wire = max(0.0, sent * cross - link.burst) / link.reached(n - 1)
    busy = (moving + work) * cluster.slowdown
    chunks = {"two_shot": n} if coding.exact else {"two_shot": n, "one_shot": 1}
    pieces = 0.0  # it does not go in segments
    if algorithm in chunks:
        pieces = max(1.0, size.values * 4 / chunks[algorithm] / link.segment)
    seconds = waiting + _overlapped(pieces, n, wire, moving, work, cluster.slowdown)
    return Cost(seconds, wire, busy / cluster.slowdown, sent, latency)


def _overlapped(
    pieces: float, n: int, wire: float, moving: float, work: float, slowdown: float
) -> float:
    """Return the time of a link and a processor that overlap in part."""
    if pieces == 0:  # each round's bytes arrive before they are folded
        return max(wire, moving * slowdown) + work * slowdown
    busy = (moving + work) * slowdown
    return max(wire, busy) + min(wire, busy) / (pieces + n - 1)


def coding_seconds(
    cluster: Cluster, coding: Coding, n: int, values: int, *, everywhere: bool = False
) -> float:
    """Return the core seconds of each of n ranks to encode, add and decode, without waits.

    With `everywhere`, every rank does for all values what owners do.
    """
    rates, memory, size = coding.rates(cluster.processor), cluster.processor.memory, 4.0 * values
    encode = 1 / rates.encode
    check = size / memory  # the check that the result is finite
    if coding.combine == "gather":
        return size * (encode + 1 / rates.decode + (n - 1) / rates.decode_add) + 3 * check
    own = size if everywhere else size / n
    owner = own * (1 / rates.decode + (n - 1) / rates.decode_add + encode) + 2 * own / memory
    return size * (encode + 1 / rates.decode) + owner + check


def _hierarchical(cluster: Cluster, coding: Coding, size: Size) -> Cost:
    """Predict an exact reduction in the node, with shards all-reduced between nodes."""
    local, nodes = cluster.ranks_per_node, cluster.nodes
    inside = _inside(cluster, size)
    shard = size.part(local)
    ways = ["gather" if coding.combine == "gather" else "two_shot"]
    if not coding.exact and in_one_shot(coding, cluster.inter):
        ways.append("one_shot")
    costs = {way: _flat(cluster, cluster.inter, nodes, coding, way, shard, local) for way in ways}
    best = min(ways, key=lambda way: costs[way].seconds)
    between, both = costs[best], costs[best].plus(inside)
    if best != "two_shot" or not (coding.exact or coding.combine == "recode"):
        return both
    stages = (size.plain if coding.exact else 4 * shard.values / nodes) / STAGE
    longer, shorter = sorted((between.seconds, inside.seconds), reverse=True)
    seconds = longer + shorter / max(1.0, stages)
    return Cost(seconds, between.wire, both.processor, both.sent, both.latency)


def _inside(cluster: Cluster, size: Size) -> Cost:
    """Predict the exact reduce-scatter and all-gather in a node, which send nothing out."""
    whole = Size(size.values, size.plain, size.value_bytes)
    half = _flat(cluster, cluster.intra, cluster.ranks_per_node, NONE, "two_shot", whole)
    return Cost(half.seconds, 0.0, half.processor, 0.0, half.latency)
