"""Straggler monitor thread: the ranks of each group exchange statistics through the group's store.

Every process has one such thread, from its first group of the backend "pycomm" to its last. At
each full period it publishes this rank's statistics in every group; a moment later the first rank
of each reads what all have published, and logs a line if there is a finding. No rank waits for
another: a rank that has published nothing is left out of the comparison.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pycomm import _C
from pycomm.env import env
from pycomm.log import logger, warn_once
from pycomm.straggler.compare import (
    Health,
    LinkStats,
    RankStats,
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
    before: dict[int, LinkStats] = field(default_factory=dict)
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
        since = time.time_ns() - round(1e9 * self.period)
        traces = _C.traces()

        def put(group: MonitoredGroup) -> None:
            trace = _trace_of(group, traces)
            if trace is None:  # it has just ended
                return
            me = group.ranks[group.rank]
            others = [t for t in traces if t is not trace and t["global_ranks"][t["rank"]] == me]
            stats = rank_stats(trace, others, before=group.before, since_ns=since)
            group.before = links(trace)
            group.put(group.key(group.rank), json.dumps({"number": number, **stats.to_json()}))

        self._for_each_group(put)

    def read(self, number: int) -> None:
        """Compare the published statistics of the groups whose first rank this is; report."""
        self.found = {}

        def look(group: MonitoredGroup) -> None:
            if group.rank > 0:
                return
            told = [json.loads(group.look(group.key(r)) or "{}") for r in range(len(group.ranks))]
            known = [RankStats.from_json(one) for one in told if one.get("number") == number]
            if health := compare(known):
                self.found[group.name, group.ranks] = health

        self._for_each_group(look)
        worst = sorted(self.found.values(), key=lambda health: -health.seconds)
        for finding in [health.finding for health in worst if health.finding is not None][:1]:
            about = finding.rank, finding.cause
            if number >= self._said.get(about, number - _SELDOM) + _SELDOM:
                self._said[about] = number
                self._say(finding.text)

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
            except RuntimeError as error:  # the store is gone, or a stranger writes to it
                if "of the secret" in str(error):
                    warn_once(f"slow ranks of the group {group.name!r} cannot be told: {error}")
                with self._lock:
                    self._groups = [g for g in self._groups if g is not group]


def _trace_of(group: MonitoredGroup, traces: Sequence[Trace]) -> Trace | None:
    mine = (group.name, group.rank)
    return next((t for t in traces if (t["group"], t["rank"]) == mine), None)


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
