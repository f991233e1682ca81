"""Statistics of one rank's operations: times, totals, and where the time went.

Hosts have their own clocks, so a timestamp of one rank is never compared with one of another. Ranks
compare *durations*: how long each was busy before an operation, and how long it waited in it.
"""

from __future__ import annotations

import socket
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

Trace = Mapping[str, Any]
"""An entry of ``_C.traces()``."""

SYMMETRIC = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
"""Operations in which every rank waits for every other. The root of a broadcast waits for no rank,
which does not make it late."""

SAMPLE = 128
"""Largest number of operations of a group that are compared."""


class TimeShares(NamedTuple):
    """Seconds from the end of one operation to the end of the next, by what they were spent on."""

    compute: float
    """Time between the two operations, in no other operation of this process."""
    elsewhere: float
    """Time between the two operations, in operations of other groups."""
    waited: float
    """Time in the operation with nothing to do but wait for other ranks."""
    codec: float
    """Time of encoding and decoding."""
    moving: float
    """The rest of the operation: copies, sums, and network calls."""


class LinkStats(NamedTuple):
    """Data sent from one rank to another over the network."""

    bytes: int
    seconds: float
    """Time in which there was something to send and the other rank accepted it."""


@dataclass(frozen=True)
class RankStats:
    """Statistics that one rank publishes to the others of a group."""

    rank: int
    """Rank among all processes; the keys of `links` are such ranks, too."""
    host: str
    operations: Mapping[int, TimeShares]
    """Operations by sequence number in the group; all ranks choose the same ones."""
    links: Mapping[int, LinkStats]

    def to_json(self) -> dict[str, Any]:
        """Return a value for JSON, with times in whole microseconds."""
        rows = [[seq, *(round(1e6 * t) for t in spent)] for seq, spent in self.operations.items()]
        links = [[rank, link.bytes, round(1e6 * link.seconds)] for rank, link in self.links.items()]
        return {"rank": self.rank, "host": self.host, "operations": rows, "links": links}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> RankStats:
        """Return the statistics that `to_json` has written."""
        operations = {row[0]: TimeShares(*(t / 1e6 for t in row[1:])) for row in told["operations"]}
        links = {rank: LinkStats(size, busy / 1e6) for rank, size, busy in told["links"]}
        return cls(told["rank"], told["host"], operations, links)


@dataclass(frozen=True)
class Totals:
    """Totals of the completed operations of one kind in one group."""

    op: str
    count: int
    bytes: int
    """Bytes of the tensors, as the caller counts them."""
    seconds: float
    waited: float
    codec: float
    median: float | None
    """Seconds of one operation. Only operations still in the trace count, here and in `p99`."""
    p99: float | None


@cache
def host() -> str:
    """Return this host's name."""
    return socket.gethostname()


def quantile(values: Iterable[float], q: float) -> float | None:
    """Return the value that a share q of the values do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def totals(trace: Trace) -> list[Totals]:
    """Return the totals of one group, by kind of operation."""
    lengths: dict[str, list[float]] = {}
    for record in _completed(trace):
        seconds = (record["ended_ns"] - record["started_ns"]) / 1e9
        lengths.setdefault(record["op"], []).append(seconds)
    return [
        Totals(
            op=sums["op"],
            count=sums["count"],
            bytes=sums["bytes"],
            seconds=sums["ns"] / 1e9,
            waited=sums["waited_ns"] / 1e9,
            codec=sums["coded_ns"] / 1e9,
            median=quantile(lengths.get(sums["op"], ()), 0.5),
            p99=quantile(lengths.get(sums["op"], ()), 0.99),
        )
        for sums in trace["totals"]
    ]


def links(trace: Trace) -> dict[int, LinkStats]:
    """Return the data sent to each rank since the start, by its rank among all processes."""
    ranks = trace["global_ranks"]
    return {ranks[i]: LinkStats(n, us / 1e6) for i, (n, us) in enumerate(trace["links"]) if n > 0}


def rank_stats(
    trace: Trace,
    others: Iterable[Trace] = (),
    *,
    before: Mapping[int, LinkStats] | None = None,
    since_ns: int = 0,
) -> RankStats:
    """Return the statistics that this rank publishes to the others of a group.

    Args:
        trace: trace of the group.
        others: traces of the other groups of this process.
        before: links at the time of the last call, which are subtracted.
        since_ns: operations that ended before this are left out; nanoseconds since the epoch.
    """
    busy = _Busy(record for other in others for record in _completed(other))
    known = {record["seq"]: record for record in _completed(trace)}
    # Multiplying the number scrambles it: as good as a random draw, and equal on all ranks.
    drawn = {seq: seq * 2654435761 & 0xFFFFFFFF for seq in known}
    recent = [seq for seq, record in known.items() if record["ended_ns"] >= since_ns]
    keep = 1 << max(0, (len(recent) - 1).bit_length() - SAMPLE.bit_length() + 1)
    operations = {}
    for seq in recent:
        last = known.get(seq - 1)
        if drawn[seq] >= 0x100000000 // keep or last is None or known[seq]["op"] not in SYMMETRIC:
            continue
        operations[seq] = _spent(last["ended_ns"], known[seq], busy)
    now, then = links(trace), before or {}
    more = {
        rank: LinkStats(link.bytes - then[rank].bytes, link.seconds - then[rank].seconds)
        if rank in then and then[rank].bytes <= link.bytes  # else it has reconnected
        else link
        for rank, link in now.items()
    }
    return RankStats(trace["global_ranks"][trace["rank"]], host(), operations, more)


def _completed(trace: Trace) -> Iterator[Mapping[str, Any]]:
    """Yield the completed collectives that the trace still holds, and that had something to run."""
    for record in trace["records"]:
        ran = record["state"] == "completed" and record["started_ns"] is not None
        if ran and record["op"] not in ("send", "recv"):
            yield record


def _spent(since: int, record: Mapping[str, Any], busy: _Busy) -> TimeShares:
    started, ended = record["started_ns"], record["ended_ns"]
    waited, coded = record["waited_ns"], record["coded_ns"]
    elsewhere = busy.between(since, started)
    outside = max(0, started - since - elsewhere)
    moving = max(0, ended - started - waited - coded)
    return TimeShares(*(ns / 1e9 for ns in (outside, elsewhere, waited, coded, moving)))


class _Busy:
    """The union of the intervals in which some operation ran."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._stretches: list[tuple[int, int]] = []
        for begin, end in sorted((r["started_ns"], r["ended_ns"]) for r in records):
            if self._stretches and begin <= self._stretches[-1][1]:
                last = self._stretches[-1]
                self._stretches[-1] = (last[0], max(last[1], end))
            else:
                self._stretches.append((begin, end))
        self._ends = [end for _, end in self._stretches]
        self._sums = [0, *accumulate(end - begin for begin, end in self._stretches)]

    def between(self, begin: int, end: int) -> int:
        """Return the busy time between two moments."""
        return self._until(end) - self._until(begin) if begin < end else 0

    def _until(self, moment: int) -> int:
        i = bisect_left(self._ends, moment)
        part = max(0, moment - self._stretches[i][0]) if i < len(self._stretches) else 0
        return self._sums[i] + part
