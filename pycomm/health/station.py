"""How ranks put their figures together: once a minute, by the store in which they have met.

Every process has one thread for this, from its first group of the backend "pycomm" to its last. At
the full minute it puts down what it knows of all groups; a moment later the first rank reads what
all have put down, and says on the console if something is off. Nobody waits for anybody: who has
nothing to say this time is left out.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pycomm import _C
from pycomm.env import env
from pycomm.health.compare import Finding, Health, compare
from pycomm.health.figures import Account, Link, Trace, account, links

# How soon the thread sees that it is to end, in seconds.
_LOOK = 0.5
# What ranks may be late with putting down their figures, in seconds, and as a share of the time
# from one comparison to the next.
_PATIENCE = 2.0
_PATIENCE_SHARE = 0.25
# What goes on is said after 1, 2, 4 ... times, and at least so often.
_SELDOM = 60


@dataclass(frozen=True)
class Group:
    """A group of this process, and the store in which its ranks have met.

    Both functions raise RuntimeError when that is gone.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    """Of its members, among all processes."""
    put: Callable[[str, str], None]
    """Sets a key of the store."""
    look: Callable[[str], str | None]
    """Returns what it has for a key now, without waiting."""


GroupKey = tuple[str, tuple[int, ...]]


class Console:
    """Says what is off: at most once in each comparison, and the same ever more seldom."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._about: tuple[int, str] | None = None
        self._quiet = self._times = 0

    def hear(self, findings: Sequence[Finding]) -> None:
        """Take what one comparison has found, the worst first."""
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
        self._say(f"pycomm: {findings[0].text}")


class Station:
    """The thread of this process and what it knows.

    Args:
        period: seconds from one comparison to the next.
        say: gets the lines for the console.
    """

    def __init__(self, period: float, say: Callable[[str], None]) -> None:
        self.period = period
        self.found: dict[GroupKey, Health] = {}
        """What the last comparison has found; on the first rank."""
        self._console = Console(say)
        self._groups: list[Group] = []
        self._before: dict[GroupKey, dict[int, Link]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def join(self, group: Group) -> None:
        """Take part with a group, for as long as it lives."""
        with self._lock:
            self._groups.append(group)
            if self._thread is None or not self._thread.is_alive():  # not in a forked child
                self._ends.clear()
                self._thread = threading.Thread(target=self._run, name="pycomm-health", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread: it must not use a store when the interpreter is gone."""
        self._ends.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def put_down(self, number: int) -> None:
        """Tell the others what this process knows, as comparison ``number``."""
        for root in self._roots():
            told = []
            for trace, others in _traces_among(root):
                key = trace["group"], tuple(trace["global_ranks"])
                since = time.time_ns() - round(1e9 * self.period)
                known = account(trace, others, before=self._before.get(key), since_ns=since)
                self._before[key] = links(trace)
                told.append({"group": key[0], "ranks": key[1], "account": known.to_json()})
            text = json.dumps({"number": number, "groups": told})
            with self._while_it_lives(root):
                root.put(_key(root.rank), text)

    def read(self, number: int) -> None:
        """On the first rank: compare what all have put down, and say if something is off."""
        roots = [root for root in self._roots() if root.rank == 0]
        if not roots:
            return
        accounts: dict[GroupKey, list[Account]] = {}
        for root in roots:
            for entry in self._put_down_by_all(root, number):
                known = Account.from_json(entry["account"])
                accounts.setdefault((entry["group"], tuple(entry["ranks"])), []).append(known)
        compared = {key: compare(known) for key, known in accounts.items()}
        self.found = {key: health for key, health in compared.items() if health is not None}
        worst = sorted(self.found.values(), key=lambda health: -health.seconds)
        self._console.hear([h.finding for h in worst if h.finding is not None])

    def _run(self) -> None:
        number = int(time.time() // self.period)
        patience = min(_PATIENCE, _PATIENCE_SHARE * self.period)
        while self._sleep_until((number + 1) * self.period):
            number = int(time.time() // self.period)
            self.put_down(number)
            if not self._sleep_until(number * self.period + patience):
                return
            self.read(number)

    def _sleep_until(self, moment: float) -> bool:
        """False if there is nothing left to do, and the thread is to end."""
        while self._living():
            left = moment - time.time()
            if left <= 0:
                return True
            self._ends.wait(min(left, _LOOK))
        return False

    def _living(self) -> bool:
        """Forget the groups that are gone; False if none is left."""
        living = set(_C.groups())
        with self._lock:
            self._groups = [g for g in self._groups if (g.name, g.rank) in living]
            if self._groups and not self._ends.is_set():
                return True
            self._thread = None
            return False

    def _roots(self) -> list[Group]:
        """Groups by whose stores figures travel: those that are in no earlier one."""
        with self._lock:
            groups = list(self._groups)
        roots: list[Group] = []
        for group in groups:
            if not any(set(group.ranks) <= set(root.ranks) for root in roots):
                roots.append(group)
        return roots

    def _put_down_by_all(self, root: Group, number: int) -> Iterator[dict[str, Any]]:
        with self._while_it_lives(root):
            for rank in range(len(root.ranks)):
                text = root.look(_key(rank))
                told: dict[str, Any] = json.loads(text) if text else {}
                if told.get("number") == number:
                    yield from told["groups"]

    @contextmanager
    def _while_it_lives(self, group: Group) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # the server of its store is gone, and so the job ends
            with self._lock:
                self._groups = [g for g in self._groups if g is not group]


def _key(rank: int) -> str:
    return f"pycomm/health/{rank}"


def _traces_among(root: Group) -> list[tuple[Trace, list[Trace]]]:
    """The traces of this rank's groups with no ranks but those of `root`, each with all others."""
    me = root.ranks[root.rank]
    ours = [trace for trace in _C.traces() if trace["global_ranks"][trace["rank"]] == me]
    return [
        (trace, [other for other in ours if other is not trace])
        for trace in ours
        if len(trace["global_ranks"]) > 1 and set(trace["global_ranks"]) <= set(root.ranks)
    ]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_station: Station | None = None


def join(trace: Trace, put: Callable[[str, str], None], look: Callable[[str], str | None]) -> None:
    """Take part with a new group, unless PYCOMM_HEALTH is off or it has one rank.

    Every backend calls this. The group is as in :class:`Group`.
    """
    global _station
    period, ranks = env().health, trace["global_ranks"]
    if period is None or len(ranks) < 2:
        return
    if _station is None:
        _station = Station(period, _print)
        atexit.register(_station.close)
    _station.join(Group(trace["group"], trace["rank"], tuple(ranks), put, look))


def found() -> dict[GroupKey, Health]:
    """Return what the last comparison has found, by group; empty but on the first rank."""
    return {} if _station is None else dict(_station.found)
