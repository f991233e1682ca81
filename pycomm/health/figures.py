"""What one rank knows of its operations: times, sums, and where the time went.

Hosts have clocks of their own, so no moment of one rank is ever compared with one of another. Ranks
compare *lengths*: how long each was busy before an operation, and how long it waited in it.
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
"""As ``_C.traces()`` has it."""

SYMMETRIC = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
"""Operations in which every rank waits for every other. The root of a broadcast waits for nobody,
and is not late for that."""

SAMPLE = 128
"""So many operations of a group are compared at most."""


class Spent(NamedTuple):
    """Where the time went from the end of one operation to that of the next, in seconds."""

    compute: float
    """Between the two, in no other operation of this process."""
    elsewhere: float
    """Between the two, in operations of other groups."""
    waited: float
    """With nothing to do but to wait for other ranks."""
    codec: float
    """Encoding and decoding."""
    moving: float
    """The rest of the operation: copies, sums, and calls of the network."""


class Link(NamedTuple):
    """What has gone from one rank to another by the network."""

    bytes: int
    seconds: float
    """While there was something to carry and the other rank took it."""


@dataclass(frozen=True)
class Account:
    """What one rank tells the others of a group."""

    rank: int
    """Among all processes, as is the rank of a link."""
    host: str
    operations: Mapping[int, Spent]
    """By their number in the group; all ranks choose the same ones."""
    links: Mapping[int, Link]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it, with times in whole microseconds."""
        rows = [[seq, *(round(1e6 * t) for t in spent)] for seq, spent in self.operations.items()]
        links = [[rank, link.bytes, round(1e6 * link.seconds)] for rank, link in self.links.items()]
        return {"rank": self.rank, "host": self.host, "operations": rows, "links": links}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Account:
        """Undo `to_json`."""
        operations = {row[0]: Spent(*(t / 1e6 for t in row[1:])) for row in told["operations"]}
        links = {rank: Link(size, busy / 1e6) for rank, size, busy in told["links"]}
        return cls(told["rank"], told["host"], operations, links)


@dataclass(frozen=True)
class Totals:
    """The completed operations of one kind in one group."""

    op: str
    count: int
    bytes: int
    """Of tensors, as the caller counts them."""
    seconds: float
    waited: float
    codec: float
    median: float | None
    """Seconds of one operation; this and the next of those that the trace remembers."""
    p99: float | None


@cache
def host() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def quantile(values: Iterable[float], q: float) -> float | None:
    """Return the value that a share q of them do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def totals(trace: Trace) -> list[Totals]:
    """Return what one group has done, by kind of operation."""
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


def links(trace: Trace) -> dict[int, Link]:
    """Return what has gone to each rank since the start, by its number among all processes."""
    ranks = trace["global_ranks"]
    return {ranks[i]: Link(n, us / 1e6) for i, (n, us) in enumerate(trace["links"]) if n > 0}


def account(
    trace: Trace,
    others: Iterable[Trace] = (),
    *,
    before: Mapping[int, Link] | None = None,
    since_ns: int = 0,
) -> Account:
    """Return what this rank tells the others of a group.

    Args:
        trace: of the group.
        others: those of the other groups of this process.
        before: links at the time of the last account, which are taken off.
        since_ns: operations that ended before are left out; nanoseconds since the epoch.
    """
    busy = _Busy(record for other in others for record in _completed(other))
    known = {record["seq"]: record for record in _completed(trace)}
    # A number that is multiplied so is as good as drawn, and equal on all ranks.
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
        rank: Link(link.bytes - then[rank].bytes, link.seconds - then[rank].seconds)
        if rank in then and then[rank].bytes <= link.bytes  # else connected anew
        else link
        for rank, link in now.items()
    }
    return Account(trace["global_ranks"][trace["rank"]], host(), operations, more)


def _completed(trace: Trace) -> Iterator[Mapping[str, Any]]:
    """The collectives that the trace remembers and that are done."""
    for record in trace["records"]:
        if record["state"] == "completed" and record["op"] not in ("send", "recv"):
            yield record


def _spent(since: int, record: Mapping[str, Any], busy: _Busy) -> Spent:
    started, ended = record["started_ns"], record["ended_ns"]
    waited, coded = record["waited_ns"], record["coded_ns"]
    elsewhere = busy.between(since, started)
    outside = max(0, started - since - elsewhere)
    moving = max(0, ended - started - waited - coded)
    return Spent(*(ns / 1e9 for ns in (outside, elsewhere, waited, coded, moving)))


class _Busy:
    """Stretches of time in which some operation ran, each once."""

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
        """How much of it lies between two moments."""
        return self._until(end) - self._until(begin) if begin < end else 0

    def _until(self, moment: int) -> int:
        i = bisect_left(self._ends, moment)
        part = max(0, moment - self._stretches[i][0]) if i < len(self._stretches) else 0
        return self._sums[i] + part
