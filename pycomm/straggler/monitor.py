"""Straggler monitor thread: exchanges the statistics of all ranks through the rendezvous store.

Every process has one such thread, from its first group of the backend "pycomm" to its last. At
each full period it publishes the statistics of all groups; a moment later rank 0 reads what every
rank has published, and logs a line if there is a finding. No rank waits for another: a rank that
has published nothing is left out of the comparison.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pycomm import _C
from pycomm.env import env
from pycomm.log import logger
from pycomm.straggler.compare import (
    Health,
    LinkStats,
    RankStats,
    SlowRank,
    Trace,
    compare,
    links,
    rank_stats,
)

# Interval in seconds at which the thread checks whether it must end.
_LOOK = 0.5
# How late a rank may publish its statistics: in seconds, and as a share of the period between two
# comparisons.
_GRACE = 2.0
_GRACE_SHARE = 0.25
# A finding that persists is printed again after 1, 2, 4 ... comparisons, and at least this often.
_SELDOM = 60
# What reading values raises that no rank has written.
_NO_STATISTICS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
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


GroupKey = tuple[str, tuple[int, ...]]


class Console:
    """The console output: at most one line per comparison, and fewer while a cause persists."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._about: tuple[int, str] | None = None
        self._quiet = self._times = 0

    def report(self, findings: Sequence[SlowRank]) -> None:
        """Report the findings of one comparison, the worst first."""
        if not findings:
            self._quiet += 1
            if self._quiet > _SELDOM:
                self._about = None
            return
        about = findings[0].rank, findings[0].cause
        if about != self._about:
            self._about, self._times = about, 0
        elif self._quiet + 1 < min(1 << (self._times - 1), _SELDOM):
            self._quiet += 1
            return
        self._quiet = 0
        self._times += 1
        self._say(findings[0].text)


class StragglerMonitor:
    """The monitor thread of this process and its state.

    Args:
        period: seconds from one comparison to the next.
        say: receives the lines for the console.
    """

    def __init__(self, period: float, say: Callable[[str], None]) -> None:
        self.period = period
        self.found: dict[GroupKey, Health] = {}
        """Results of the last comparison; on rank 0."""
        self._console = Console(say)
        self._groups: list[MonitoredGroup] = []
        self._before: dict[GroupKey, dict[int, LinkStats]] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def join(self, group: MonitoredGroup) -> None:
        """Monitor a group for as long as it lives."""
        with self._lock:
            self._groups.append(group)
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
        for root in self._roots():
            told = []
            for trace, others in _traces_among(root):
                key = trace["group"], tuple(trace["global_ranks"])
                since = time.time_ns() - round(1e9 * self.period)
                known = rank_stats(trace, others, before=self._before.get(key), since_ns=since)
                self._before[key] = links(trace)
                told.append({"group": key[0], "ranks": key[1], "rank_stats": known.to_json()})
            text = json.dumps({"number": number, "groups": told})
            with self._while_it_lives(root):
                root.put(_key(root.rank), text)

    def read(self, number: int) -> None:
        """Compare the published statistics and report findings; on rank 0."""
        roots = [root for root in self._roots() if root.rank == 0]
        if not roots:
            return
        all_stats: dict[GroupKey, list[RankStats]] = {}
        for root in roots:
            for key, one in self._put_down_by_all(root, number):
                all_stats.setdefault(key, []).append(one)
        self.found = {}
        for key, known in all_stats.items():
            try:
                health = compare(known)
            except _NO_STATISTICS:
                self._warn_of(key[0], "what the store has of its ranks is no statistics")
                continue
            if health is not None:
                self.found[key] = health
        worst = sorted(self.found.values(), key=lambda health: -health.seconds)
        self._console.report([h.finding for h in worst if h.finding is not None])

    def _run(self) -> None:
        number = int(time.time() // self.period)
        grace = min(_GRACE, _GRACE_SHARE * self.period)
        while self._sleep_until((number + 1) * self.period):
            number = int(time.time() // self.period)
            self.publish(number)
            if not self._sleep_until(number * self.period + grace):
                return
            self.read(number)

    def _sleep_until(self, moment: float) -> bool:
        """Sleep until then; return False early if no group is left or the thread must end."""
        while self._living():
            left = moment - time.time()
            if left <= 0:
                return True
            self._ends.wait(min(left, _LOOK))
        return False

    def _living(self) -> bool:
        """Drop the groups that are gone; return False if none is left."""
        living = set(_C.groups())
        with self._lock:
            self._groups = [g for g in self._groups if (g.name, g.rank) in living]
            if self._groups and not self._ends.is_set():
                return True
            self._thread = None
            return False

    def _roots(self) -> list[MonitoredGroup]:
        """Return the groups whose stores carry statistics: those that are in no earlier one."""
        with self._lock:
            groups = list(self._groups)
        roots: list[MonitoredGroup] = []
        for group in groups:
            if not any(set(group.ranks) <= set(root.ranks) for root in roots):
                roots.append(group)
        return roots

    def _put_down_by_all(
        self, root: MonitoredGroup, number: int
    ) -> Iterator[tuple[GroupKey, RankStats]]:
        with self._while_it_lives(root):
            for rank in range(len(root.ranks)):
                text = root.look(_key(rank))
                try:
                    yield from _read(text or "{}", number)
                except _NO_STATISTICS:
                    self._warn_of(root.name, f"what the store has of rank {rank} is no statistics")

    @contextmanager
    def _while_it_lives(self, group: MonitoredGroup) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "of the secret" in str(error):
                self._warn_of(group.name, str(error))
            # Otherwise the store's server is gone, so the job is ending.
            with self._lock:
                self._groups = [g for g in self._groups if g is not group]

    def _warn_of(self, group: str, problem: str) -> None:
        """Warn, once for a group."""
        if group not in self._warned:
            self._warned.add(group)
            logger.warning("slow ranks of the group %r cannot be told: %s", group, problem)


def _read(text: str, number: int) -> list[tuple[GroupKey, RankStats]]:
    """Return what a rank has published for comparison ``number``, by group."""
    told: dict[str, Any] = json.loads(text)
    if told.get("number") != number:
        return []
    return [
        ((entry["group"], tuple(entry["ranks"])), RankStats.from_json(entry["rank_stats"]))
        for entry in told["groups"]
    ]


def _key(rank: int) -> str:
    return f"pycomm/straggler/{rank}"


def _traces_among(root: MonitoredGroup) -> list[tuple[Trace, list[Trace]]]:
    """Return the traces of this rank's groups within `root`, each with all of its other traces."""
    me = root.ranks[root.rank]
    ours = [trace for trace in _C.traces() if trace["global_ranks"][trace["rank"]] == me]
    return [
        (trace, [other for other in ours if other is not trace])
        for trace in ours
        if len(trace["global_ranks"]) > 1 and set(trace["global_ranks"]) <= set(root.ranks)
    ]


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
    """Return the results of the last comparison, by group; empty except on rank 0."""
    return {} if _monitor is None else dict(_monitor.found)
