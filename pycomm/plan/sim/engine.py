"""Discrete-event engine: tasks with dependencies, lines that carry one message at a time, cores.

A task begins when all tasks it waits for have ended and its place is free for it. Places are lines
(first come, first served), threads (one task after the other, at the speed of the cores that they
share), or none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol


class SimPlace(Protocol):
    """A resource whose time tasks take."""

    def submit(self, task: SimTask) -> None: ...


class SimTask:
    """An activity that takes seconds of a place, after other tasks."""

    __slots__ = ("end", "engine", "followers", "place", "seconds", "waiting")

    def __init__(self, engine: EventClock, place: SimPlace | None, seconds: float) -> None:
        self.engine, self.place, self.seconds = engine, place, seconds
        self.waiting = 0
        self.followers: list[SimTask] = []
        self.end = -1.0  # not yet

    def ready(self) -> None:
        if self.place is None:
            self.finish()
        else:
            self.place.submit(self)

    def finish(self) -> None:
        self.end = self.engine.now
        for task in self.followers:
            task.waiting -= 1
            if task.waiting == 0:
                task.ready()
        self.followers = []


class EventClock:
    """The clock, and the queue of future events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._roots: list[SimTask] = []

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1  # events at equal times happen in the order of their insertion
        heapq.heappush(self._events, (when, self._count, what))

    def task(self, place: SimPlace | None, seconds: float, after: Iterable[SimTask]) -> SimTask:
        """Add a task. Must be called before :meth:`run`."""
        task = SimTask(self, place, seconds)
        for other in after:
            other.followers.append(task)
            task.waiting += 1
        if task.waiting == 0:
            self._roots.append(task)
        return task

    def run(self) -> float:
        """Process all events; return the time of the last one."""
        for task in self._roots:
            task.ready()
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.now


class Transfer:
    """One direction of a link's end: bytes leave, or arrive, one message after the other.

    After a pause a burst passes at once: unused capacity accumulates, up to a number of bytes.
    """

    def __init__(self, engine: EventClock, rate: float, burst: float = 0.0) -> None:
        self.engine, self.rate = engine, rate
        self.credit = burst / rate
        self.free = -self.credit

    def take(self, size: float, earliest: float = 0.0) -> tuple[float, float]:
        """Return begin and end of a message that is ready now; the end is >= `earliest`."""
        now = self.engine.now
        begin = max(now, self.free)
        self.free = max(
            max(now - self.credit, self.free) + size / self.rate, earliest - self.credit
        )
        return begin, max(now, self.free, earliest)


class Way:
    """A path between two ends of links: the head of a message arrives after the latency."""

    def __init__(self, out: Transfer, into: Transfer, latency: float) -> None:
        self.out, self.into, self.latency = out, into, latency

    def submit(self, task: SimTask) -> None:
        """Send a message; its task's seconds are its bytes."""
        begin, end = self.out.take(task.seconds)
        engine, latency = task.engine, self.latency

        def arrive() -> None:
            engine.at(self.into.take(task.seconds, end + latency)[1], task.finish)

        engine.at(begin + latency, arrive)


class Cores:
    """Cores that threads share evenly; one thread uses one core at most.

    A virtual clock shows the seconds that every running thread has received, so a thread's end is
    known when it starts.
    """

    def __init__(self, engine: EventClock, count: float) -> None:
        self.engine, self.count = engine, count
        self._running: list[tuple[float, int, Thread, SimTask]] = []
        self._virtual = self._since = 0.0
        self._version = self._started = 0

    def _speed(self) -> float:
        return min(1.0, self.count / len(self._running))

    def _advance(self) -> None:
        if self._running:
            self._virtual += (self.engine.now - self._since) * self._speed()
        self._since = self.engine.now

    def start(self, thread: Thread, task: SimTask) -> None:
        self._advance()
        self._started += 1
        heapq.heappush(self._running, (self._virtual + task.seconds, self._started, thread, task))
        self._expect()

    def _expect(self) -> None:
        self._version += 1
        version = self._version

        def end() -> None:
            if version == self._version:  # else a thread has started or ended since
                self._end_first()

        left = max(0.0, self._running[0][0] - self._virtual)
        self.engine.at(self.engine.now + left / self._speed(), end)

    def _end_first(self) -> None:
        self._advance()
        end, _, thread, task = heapq.heappop(self._running)
        self._virtual = max(self._virtual, end)
        if self._running:
            self._expect()
        thread.ended(task)


class Thread:
    """A thread, which runs tasks one after the other."""

    def __init__(self, cores: Cores) -> None:
        self.cores = cores
        self._queue: deque[SimTask] = deque()
        self._busy = False

    def submit(self, task: SimTask) -> None:
        if self._busy:
            self._queue.append(task)
        else:
            self._busy = True
            self.cores.start(self, task)

    def ended(self, task: SimTask) -> None:
        self._busy = False
        if self._queue:
            self.submit(self._queue.popleft())
        task.finish()
