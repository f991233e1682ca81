"""Straggler monitor: ranks compare once a minute where their time goes, and name the slowest.

Hosts have their own clocks, so a timestamp of one rank is never compared with one of another. Ranks
compare *durations*: how long each was busy before an operation, and how long it waited in it.

In an operation in which all ranks wait for each other, the others wait for the rank that waits
least. All ranks take the same time from one operation to the next, so the time that the last rank
does not spend waiting it spends on something else: more than the others on computing, on codecs, or
inside the operation. That names the cause.

A slow link makes every rank wait alike. It shows in the kernel's counters of each connection: bytes
acknowledged while there was something to send.

Every process that has groups of the backend "pycomm" has one thread for this. At each full period
it publishes this rank's statistics in every group, through the group's store; a moment later the
first rank of each reads what all have published, and logs a line if there is a finding; without a
group it ends. No rank waits for another: a rank that has published nothing is left out of the
comparison.
`pycomm.monitor` reports the result; ``docs/monitor.md`` is for users.
"""

from __future__ import annotations

import atexit
import json
import math
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import mean, median
from typing import Any, NamedTuple

from pycomm import _C
from pycomm.env import env
from pycomm.log import logger, warn_once
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
_LEAST_US = 20_000

Late = dict[int, list[float]]
"""By how many seconds a rank comes last to operations that are waited for."""


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
    """Compare the statistics of a group's ranks; return None if they share no operation."""
    if len(all_stats) < 2:
        return None
    common = sorted(set.intersection(*(set(a.operations) for a in all_stats)))
    if not common:
        return None
    times = {a.rank: [a.operations[seq] for seq in common] for a in all_stats}
    sums = {rank: TimeShares(*map(sum, zip(*spent, strict=True))) for rank, spent in times.items()}
    skews, late = _lateness(times)
    waited_for = sum(map(len, late.values())) or 1
    rates = _rates(all_stats)
    ranks = tuple(
        RankHealth(
            a.rank,
            a.host,
            TimeShares(*(part / (sum(sums[a.rank]) or 1.0) for part in sums[a.rank])),
            last=len(late[a.rank]) / waited_for,
            link=rates.get(a.rank),
        )
        for a in all_stats
    )
    return Health(
        operations=len(common),
        seconds=mean(sum(s) for s in sums.values()),
        skew_median=quantile(skews, 0.5),
        skew_p99=quantile(skews, 0.99),
        ranks=ranks,
        finding=_late_rank(late, sums, ranks) or _slow_link(ranks),
    )


def _lateness(times: Mapping[int, Sequence[TimeShares]]) -> tuple[list[float], Late]:
    """Return the skew of each operation, and how late the last rank of those with waiting is."""
    skews, events = [], []  # how long the median of the others waits for the last rank, and that
    for spent in zip(*times.values(), strict=True):
        waits = [s.waited for s in spent]
        who = waits.index(min(waits))
        others = waits[:who] + waits[who + 1 :]
        skews.append(max(waits) - waits[who])
        events.append((median(others) - waits[who], list(times)[who]))
    late: Late = {rank: [] for rank in times}
    enough = _OF_WAITING * sum(seconds for seconds, _ in events)
    for seconds, rank in sorted(events, reverse=True):
        if enough <= 0:
            break
        late[rank].append(seconds)
        enough -= seconds
    return skews, late


def _late_rank(
    all_late: Late, sums: Mapping[int, TimeShares], ranks: Sequence[RankHealth]
) -> SlowRank | None:
    worst = max(ranks, key=lambda r: sum(all_late[r.rank]))
    late = all_late[worst.rank]
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
    return SlowRank(worst.rank, cause, text)


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
    return SlowRank(slowest.rank, "link", text)


def _rates(all_stats: Sequence[RankStats]) -> dict[int, float]:
    """Return each rank's best sending or best receiving rate, whichever is less; bytes/s."""
    out: dict[int, float] = {}
    into: dict[int, float] = {}
    for a in all_stats:
        for peer, rate in a.links.items():
            out[a.rank] = max(out.get(a.rank, 0.0), rate)
            into[peer] = max(into.get(peer, 0.0), rate)
    both = out.keys() | into.keys()
    return {r: min(side[r] for side in (out, into) if r in side) for r in both}


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.0f} %"


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


@dataclass(frozen=True)
class RankStats:
    """Statistics that one rank publishes to the others of a group."""

    rank: int
    """Rank among all processes; the keys of `links` are such ranks, too."""
    host: str
    operations: Mapping[int, TimeShares]
    """Operations by sequence number in the group; all ranks choose the same ones."""
    links: Mapping[int, float]
    """Bytes per second to other ranks, while there was something to send that they accepted."""

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> RankStats:
        """Return the statistics that a rank has published as JSON of `dataclasses.asdict`."""
        operations = {int(seq): TimeShares(*spent) for seq, spent in told["operations"].items()}
        links = {int(rank): rate for rank, rate in told["links"].items()}
        return cls(told["rank"], told["host"], operations, links)


def quantile(values: Iterable[float], q: float) -> float:
    """Return the smallest value that a share q of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def rank_stats(
    trace: Trace,
    others: Iterable[Trace] = (),
    *,
    before: Sequence[tuple[int, int]] = (),
    since_ns: int = 0,
) -> RankStats:
    """Return the statistics that this rank publishes to the others of a group.

    Args:
        trace: trace of the group.
        others: traces of the other groups of this process.
        before: the trace's links at the time of the last call, which are subtracted.
        since_ns: operations that ended before this are left out; nanoseconds since the epoch.
    """
    busy = _Busy(record for other in others for record in completed(other))
    known = {record["seq"]: record for record in completed(trace)}
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
    ranks, links = trace["global_ranks"], {}
    for peer, (size, us), (old, old_us) in zip(
        ranks, trace["links"], before or [(0, 0)] * len(ranks), strict=True
    ):
        if old <= size:  # else it has reconnected
            size, us = size - old, us - old_us
        if size >= _LEAST_BYTES and us >= _LEAST_US:
            links[peer] = 1e6 * size / us
    return RankStats(ranks[trace["rank"]], socket.gethostname(), operations, links)


def completed(trace: Trace) -> Iterator[Mapping[str, Any]]:
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
    return TimeShares(*(round(ns / 1e9, 6) for ns in (outside, elsewhere, waited, coded, moving)))


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


# ------------------------------------------------------------------ the thread

# How late a rank may publish its statistics: in seconds, and as a share of the period between two
# comparisons.
_GRACE = 2.0
_GRACE_SHARE = 0.25
# Comparisons from one line about a rank and a cause to the next.
_SELDOM = 60


@dataclass(eq=False)
class MonitoredGroup:
    """A group of this process, and the store of its rendezvous.

    Both functions raise RuntimeError when the store is gone.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    """The members' ranks among all processes."""
    put: Callable[[str, str], None]
    """Function that sets a key of the store."""
    look: Callable[[str], str | None]
    """Function that returns a key's present value, or None, without waiting."""
    before: Sequence[tuple[int, int]] = ()
    """What its links had carried at the last comparison."""

    def key(self, rank: int) -> str:
        """Return the key of a member's statistics."""
        return f"pycomm/straggler/{self.name}/{rank}"


GroupKey = tuple[str, tuple[int, ...]]


class StragglerMonitor:
    """The monitor thread of this process and its state.

    Args:
        period: seconds from one comparison to the next.
        say: receives the lines for the console.
    """

    def __init__(self, period: float, say: Callable[[str], None]) -> None:
        self.period, self._say = period, say
        self.found: dict[GroupKey, Health] = {}
        """Results of the last comparison, of the groups whose first rank this is."""
        self._said: dict[tuple[int, str], int] = {}
        self._groups: list[MonitoredGroup] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def join(self, group: MonitoredGroup) -> None:
        """Monitor a group for as long as it lives."""
        with self._lock:
            mine = (group.name, group.rank)  # as one of before that has ended
            self._groups = [g for g in self._groups if (g.name, g.rank) != mine] + [group]
            if self._thread is None or not self._thread.is_alive():  # not alive in a forked child
                self._ends.clear()
                self._thread = threading.Thread(target=self._run, name="pycomm-health", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread: it must not use a store after the interpreter has shut down."""
        self._ends.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def publish(self, number: int) -> None:
        """Publish the statistics of this process for comparison ``number``."""
        since = time.time_ns() - round(1e9 * self.period)
        traces = _C.traces()

        def put(group: MonitoredGroup) -> None:
            mine = (group.name, group.rank)
            trace = next((t for t in traces if (t["group"], t["rank"]) == mine), None)
            if trace is None:
                raise RuntimeError("the group has ended")
            me = group.ranks[group.rank]
            others = [t for t in traces if t is not trace and t["global_ranks"][t["rank"]] == me]
            stats = rank_stats(trace, others, before=group.before, since_ns=since)
            group.before = trace["links"]
            group.put(group.key(group.rank), json.dumps({"number": number, **asdict(stats)}))

        self._for_each_group(put)

    def read(self, number: int) -> None:
        """Compare the published statistics of the groups whose first rank this is; report."""
        found: dict[GroupKey, Health] = {}

        def look(group: MonitoredGroup) -> None:
            if group.rank > 0:
                return
            told = [json.loads(group.look(group.key(r)) or "{}") for r in range(len(group.ranks))]
            known = [RankStats.from_json(one) for one in told if one.get("number") == number]
            if health := compare(known):
                found[group.name, group.ranks] = health

        self._for_each_group(look)
        self.found = found
        worst = sorted(found.values(), key=lambda health: -health.seconds)
        for finding in [health.finding for health in worst if health.finding is not None][:1]:
            about = finding.rank, finding.cause
            if number >= self._said.get(about, number - _SELDOM) + _SELDOM:
                self._said[about] = number
                self._say(finding.text)

    def _run(self) -> None:
        grace = min(_GRACE, _GRACE_SHARE * self.period)
        while True:
            number = int(time.time() // self.period) + 1
            if self._ends.wait(number * self.period - time.time()):
                return
            self.publish(number)
            if self._ends.wait(grace):
                return
            self.read(number)
            with self._lock:
                if not self._groups:
                    self._thread = None
                    return

    def _for_each_group(self, act: Callable[[MonitoredGroup], None]) -> None:
        """Act on each group, and monitor no longer what cannot be."""
        for group in list(self._groups):
            try:
                act(group)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                warn_once(
                    f"slow ranks of the group {group.name!r} cannot be told: what its store has is "
                    f"no statistics of a rank ({error!r})"
                )
            except RuntimeError as error:  # it or its store is gone, or a stranger writes to it
                if "of the secret" in str(error):
                    warn_once(f"slow ranks of the group {group.name!r} cannot be told: {error}")
                with self._lock:
                    self._groups = [g for g in self._groups if g is not group]


_monitor: StragglerMonitor | None = None


def join(trace: Trace, put: Callable[[str, str], None], look: Callable[[str], str | None]) -> None:
    """Monitor a new group, unless PYCOMM_HEALTH is off or the group has one rank.

    Every backend calls this. See :class:`MonitoredGroup` for the arguments.
    """
    global _monitor
    period, ranks = env().health, trace["global_ranks"]
    if period is None or len(ranks) < 2:
        return
    if _monitor is None:
        _monitor = StragglerMonitor(period, logger.warning)
        atexit.register(_monitor.close)
    _monitor.join(MonitoredGroup(trace["group"], trace["rank"], tuple(ranks), put, look))


def found() -> dict[GroupKey, Health]:
    """Return the results of the last comparison, by group, of which this is the first rank."""
    return {} if _monitor is None else dict(_monitor.found)
