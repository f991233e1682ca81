"""Comparison of the ranks of a group: which rank comes last, and why.

In an operation in which all ranks wait for each other, the others wait for the rank that waits
least. All ranks take the same time from one operation to the next, so the time that the last rank
does not spend waiting it spends on something else: more than the others on computing, on codecs, or
inside the operation. That names the cause.

A slow link makes every rank wait alike. It shows in the kernel's counters of each connection: bytes
acknowledged while there was something to send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from pycomm.straggler.stats import RankStats, TimeShares, quantile
from pycomm.units import format_bytes, format_time

# Thresholds of a finding; docs/monitor.md states these.
LEAST_LOST = 0.1
"""Least share of the time that the other ranks wait for the late rank."""
LEAST_SHARE = 2 / 3
"""Least share of the operations with waiting to which the late rank comes last."""
LEAST_TIMES = 5
"""Least number of operations to which the late rank comes last."""
MOST_OF_OTHERS = 0.6
"""A link is slow if it carries less than this share of what the others carry."""
LEAST_IN_OPERATIONS = 0.2
"""Links are judged if operations, codecs excluded, take at least this share of the time."""

# Most of the waiting happens in a few operations, such as the first of a step. The rest is noise.
_OF_WAITING = 0.9
# A link that carries less than this, or is busy for less time, is not judged: the kernel counts in
# milliseconds.
_LEAST_BYTES = 1_000_000
_LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class RankHealth:
    """One rank of a group; its number is the one among all processes."""

    rank: int
    host: str
    shares: TimeShares
    """Shares of this rank's time."""
    last: float
    """Share of the operations with waiting to which this rank comes last."""
    link: float | None
    """Bytes per second of its best outgoing or its best incoming link, whichever is less."""


@dataclass(frozen=True)
class SlowRank:
    """A problem that the comparison has found."""

    rank: int
    host: str
    cause: str
    """"compute", "codec", "moving" or "link"."""
    text: str


@dataclass(frozen=True)
class Health:
    """The comparison of all ranks of a group."""

    operations: int
    """Number of operations compared."""
    seconds: float
    """Time that these operations took, including the time before each."""
    skew_median: float
    """Seconds between the first arrival and the last."""
    skew_p99: float
    ranks: tuple[RankHealth, ...]
    finding: SlowRank | None


def compare(all_stats: Sequence[RankStats]) -> Health | None:
    """Compare the statistics of a group's ranks; return None if they share no operation.

    Of a rank that is there twice the last ones count: replicas of torchft may put down groups of
    the same name and ranks.
    """
    by_rank = {a.rank: a for a in all_stats}
    if len(by_rank) < 2:
        return None
    all_stats = [by_rank[rank] for rank in sorted(by_rank)]
    common = sorted(set.intersection(*(set(a.operations) for a in all_stats)))
    if not common:
        return None
    times = {a.rank: [a.operations[seq] for seq in common] for a in all_stats}
    sums = {rank: TimeShares(*map(sum, zip(*spent, strict=True))) for rank, spent in times.items()}
    lateness = _Lateness(times)
    rates = _rates(all_stats)
    ranks = tuple(
        RankHealth(
            a.rank,
            a.host,
            TimeShares(*(part / (sum(sums[a.rank]) or 1.0) for part in sums[a.rank])),
            last=lateness.share(a.rank),
            link=rates.get(a.rank),
        )
        for a in all_stats
    )
    return Health(
        operations=len(common),
        seconds=mean(sum(s) for s in sums.values()),
        skew_median=quantile(lateness.skews, 0.5) or 0.0,
        skew_p99=quantile(lateness.skews, 0.99) or 0.0,
        ranks=ranks,
        finding=_late_rank(lateness, sums, ranks) or _slow_link(ranks),
    )


class _Lateness:
    """The rank that comes last to each operation, and how late it is."""

    def __init__(self, times: Mapping[int, Sequence[TimeShares]]) -> None:
        self.skews = []
        events = []  # how long the median of the others waits for the last rank, and that rank
        for spent in zip(*times.values(), strict=True):
            waits = [s.waited for s in spent]
            who = waits.index(min(waits))
            others = waits[:who] + waits[who + 1 :]
            self.skews.append(max(waits) - waits[who])
            events.append((median(others) - waits[who], list(times)[who]))
        events.sort(reverse=True)
        self.events, enough = [], _OF_WAITING * sum(late for late, _ in events)
        for late, rank in events:
            if enough <= 0:
                break
            self.events.append((late, rank))
            enough -= late

    def of(self, rank: int) -> list[float]:
        """Return by how much a rank came last to those operations that have waiting."""
        return [late for late, who in self.events if who == rank]

    def share(self, rank: int) -> float:
        return len(self.of(rank)) / len(self.events) if self.events else 0.0


def _late_rank(
    lateness: _Lateness, sums: Mapping[int, TimeShares], ranks: Sequence[RankHealth]
) -> SlowRank | None:
    worst = max(ranks, key=lambda r: sum(lateness.of(r.rank)))
    late = lateness.of(worst.rank)
    lost = sum(late) / (sum(sums[worst.rank]) or 1.0)
    if lost < LEAST_LOST or len(late) < LEAST_TIMES or worst.last < LEAST_SHARE:
        return None
    own = sums[worst.rank]
    rest = [spent for rank, spent in sums.items() if rank != worst.rank]
    others = TimeShares(*map(median, zip(*rest, strict=True)))
    more = {name: getattr(own, name) - getattr(others, name) for name in TimeShares._fields}
    cause = max(more, key=lambda name: more[name])
    if cause not in _DOES:  # it waits for ranks of another group, whose comparison reports it
        return None
    share = getattr(worst.shares, cause)
    of_others = median(getattr(r.shares, cause) for r in ranks if r is not worst)
    text = (
        f"rank {worst.rank} ({worst.host}) comes last to {percent(worst.last)} of the operations "
        f"that are waited for, {format_time(median(late))} late at the median, which costs "
        f"{percent(lost)} of the time: it {_DOES[cause]} for {percent(share)} of the time, others "
        f"for {percent(of_others)}"
    )
    return SlowRank(worst.rank, worst.host, cause, text)


_DOES = {"compute": "computes", "codec": "encodes and decodes", "moving": "copies and sums"}


def _slow_link(ranks: Sequence[RankHealth]) -> SlowRank | None:
    linked = [r for r in ranks if r.link is not None]
    in_operations = mean(r.shares.waited + r.shares.moving for r in ranks)
    if len(linked) < 3 or in_operations < LEAST_IN_OPERATIONS:
        return None
    slowest = min(linked, key=lambda r: r.link or 0.0)
    others = median(r.link or 0.0 for r in linked if r is not slowest)
    if slowest.link is None or slowest.link >= MOST_OF_OTHERS * others:
        return None
    text = (
        f"the link of rank {slowest.rank} ({slowest.host}) carries {format_bytes(slowest.link)}/s "
        f"to another rank at best, those of others {format_bytes(others)}/s, and "
        f"{percent(in_operations)} of the time goes to moving data and waiting for it"
    )
    return SlowRank(slowest.rank, slowest.host, "link", text)


def _rates(all_stats: Sequence[RankStats]) -> dict[int, float]:
    """Return each rank's best sending or best receiving rate, whichever is less; bytes/s."""
    out: dict[int, float] = {}
    into: dict[int, float] = {}
    for a in all_stats:
        for peer, link in a.links.items():
            if link.bytes < _LEAST_BYTES or link.seconds < _LEAST_SECONDS:
                continue
            rate = link.bytes / link.seconds
            out[a.rank] = max(out.get(a.rank, 0.0), rate)
            into[peer] = max(into.get(peer, 0.0), rate)
    both = out.keys() | into.keys()
    return {r: min(side[r] for side in (out, into) if r in side) for r in both}


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.0f} %"
