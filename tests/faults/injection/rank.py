"""One rank of a case: it joins, calls, fails or sees another rank fail, and continues."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.injection.case import FROM_OUTSIDE, HUNGRY, LASTS, MEET, MEETING, Call, Case
from tests.faults.injection.groups import CoreGroup
from tests.ranks import in_child
from tests.soak.held import COUNTS, connections, descriptors
from tests.soak.held import held as held_by

SETTLE = 2.0
"""Seconds for ending threads and closing files to disappear. Torch's never do."""
OURS = 7.0
"""The value that a rank writes to its arrays after a failed call."""
SLOW = 0.15
"""Seconds that a slow rank sleeps."""


class Injected(Exception):
    """The exception that a case raises in its victim."""


def held() -> dict[str, int]:
    """Count the resources that a group may leave behind in this process."""
    gc.collect()
    found = held_by("self")
    return {what: found[what] for what in COUNTS}


def leaks(before: dict[str, int], limit: float) -> dict[str, int]:
    """Return the resources that are new since `before`, after some time to settle."""
    end = time.monotonic() + limit
    while True:
        now = held()
        more = {what: n - before[what] for what, n in now.items() if n > before[what]}
        if not more or time.monotonic() > end:
            return more
        time.sleep(0.005)


def cut_sockets(rng: random.Random, *, for_ever: bool) -> None:
    """Cut this rank's TCP connections: in both directions, or only in the sending direction.

    With `for_ever` its listeners, too: nobody reaches it again.
    """
    way = rng.choice((socket.SHUT_RDWR, socket.SHUT_WR))
    for _, twin in connections():
        with contextlib.suppress(OSError):
            if for_ever or not twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                twin.shutdown(way)


def close_descriptors() -> None:
    """Close the group's descriptors of shared memory and of watched processes."""
    for number, target in descriptors().items():
        if "memfd:pycomm" in target or "pidfd" in target:
            with contextlib.suppress(OSError):
                os.close(number)


class Rank:
    """One rank. `say(word, facts)` reports to the player, which calls the methods that it tells."""

    cut_for_ever = True

    def __init__(self, case: Case, rank: int, folder: str, say: Any) -> None:
        self.case, self.rank, self.folder, self.say = case, rank, folder, say
        self.is_victim = rank == case.victim
        self.now: Call | None = None
        self.first: CoreGroup | None = None
        self.group: Any = None  # a CoreGroup, or that of an ElasticRank
        self.arrays: list[Any] = []
        """the arrays of a failed call, which no peer may write any more"""
        self.child: str | None = None
        self.due = float("inf")  # the time of a fault that this rank injects itself
        self.began = 0.0  # the last call
        self.aborted = False
        self.before: dict[str, int] = {}

    def join(self, name: str) -> CoreGroup:
        case = self.case
        return CoreGroup(
            self.folder,
            name,
            self.rank,
            case.ranks,
            case.transport,
            case.rendezvous,
            hosts=case.ranks if case.is_apart else 0,  # no rank sees another's process
            parent=self.group,
        )

    def meet(self) -> None:
        """Make what there is before the case's phase."""
        self.before = held()
        if self.case.phase != "init":
            self.first = self.group = self.join("first")
            self.run(Call("all_reduce", 10))

    def operate(self, _: Any) -> None:
        """Go through the phase; say over what error it has ended, and what is left behind."""
        facts: dict[str, Any] = {}
        self.arm()
        try:
            if self.group is None or self.case.phase == "split":
                self.group = self.join("second")
                if self.aborted:  # the first group, if this one was made already
                    self.group.abort("somebody pressed stop")
            self.group.set_timeout(self.case.timeout)
            self.group.in_heap = self.case.fault == "pause" and self.case.how < 0.5
            self.call()
        except Injected:
            self.group = self.first = None
            gc.collect()
            sys.exit()
        except Exception as error:
            facts = self.tell(error)
        if self.case.fault == "pause":
            self.arrays = self.group.arrays
            for array in self.arrays:
                array[:] = OURS
        self.say("over", {"at": time.monotonic(), **facts})
        for group in (self.group, self.first):
            if group is not None:
                group.close()
        self.group = self.first = group = None
        # Arrays keep the mapping of their heap.
        self.say("left", {} if self.arrays else leaks(self.before, SETTLE))

    def go_on(self, left: list[int], _: Any) -> None:
        """Make a group of the survivors and reduce over it."""
        rank, transport = left.index(self.rank), self.case.transport
        group = CoreGroup(self.folder, "after", rank, len(left), transport, 8.0)
        if not group.call(Call("all_reduce", 1000), False):
            raise AssertionError("the new group's result is wrong")
        group.close()
        # No peer has written to this rank's arrays since it left.
        if not all((array == OURS).all() for array in self.arrays):
            raise AssertionError(f"rank {self.rank}: another rank has written to our memory")

    def tell(self, error: Exception) -> dict[str, Any]:
        """Return the facts of an error. The error itself, with its frames, must not be kept."""
        return {
            "error": type(error).__name__,
            "named": getattr(error, "rank", None),
            "text": str(error)[:1500],
            "op": self.now.op if self.now else "",
            "seq": self.group.completed + 1 if self.group else 0,
            "began": self.began,
        }

    # ------------------------------------------------------------------ the calls

    def run(self, call: Call) -> None:
        self.now, self.began = call, time.monotonic()
        if not self.group.call(call, self.case.async_op):
            raise AssertionError(f"rank {self.rank}: a wrong result of {call}")
        self.now = None

    def call(self) -> None:
        """Call operations until a fault; in shutdown, and where all continue, a fixed number."""
        case = self.case
        if case.phase == "shutdown":
            self.run(case.calls[0])
            return
        lasts = case.fault in LASTS
        for number in itertools.count():
            if self.is_victim and time.monotonic() >= self.due:
                self.due = float("inf")
                self.fail()
            # The root of small broadcasts runs ahead of a stopped rank until the buffers between
            # them are full, which at a distance takes hundreds of thousands of calls.
            if number % MEETING == MEETING - 1:
                self.run(MEET)
            if number != case.without_memory_at:
                self.run(case.calls[number % len(case.calls)])
            elif self.is_victim:
                self.call_without_memory()
            else:
                self.run(HUNGRY)
            # All ranks leave after the same call, which one of them announces.
            if self.child is not None and self.child != "refused":
                raise AssertionError(f"rank {self.rank}: a call in a forked child: {self.child}")
            if lasts and number % 16 == 15 and self.enough():
                return

    def enough(self) -> bool:
        """Return whether the time of a case without an error is over, equally on all ranks."""
        over = np.array([time.monotonic() - self.started > 0.05 + SLOW], np.float32)
        self.group._core.all_reduce(over, "min")
        self.group.completed += 1
        return bool(over[0])

    # ------------------------------------------------------------------ the fault

    def arm(self) -> None:
        """Schedule the fault if this rank has to inject it."""
        self.started = time.monotonic()
        case = self.case
        if not self.is_victim or case.fault in (*FROM_OUTSIDE, "memory"):
            return
        if case.fault in ("_exit", "socket", "abort", "fork", "descriptors"):  # at any point

            def happen() -> None:
                time.sleep(case.delay)
                self.fail()

            threading.Thread(target=happen, daemon=True).start()
        else:
            self.due = self.started + case.delay

    def fail(self) -> None:
        case = self.case
        self.say("fault", time.monotonic())
        if case.fault == "_exit":
            os._exit(3)
        if case.fault == "exit":
            sys.exit(3)
        if case.fault == "raise":
            raise Injected("the user's code has failed")
        if case.fault == "socket":
            cut_sockets(random.Random(case.how), for_ever=self.cut_for_ever)
        elif case.fault == "fork":
            self.child = in_child(lambda: self.group.call(Call("all_reduce", 10), False))
        elif case.fault == "descriptors":
            close_descriptors()
        elif case.fault == "slow":
            time.sleep(SLOW)
        elif case.fault == "abort":
            self.aborted = True
            self.group.abort("somebody pressed stop")

    def call_without_memory(self) -> None:
        """Make the call that needs memory while none is available."""
        self.now = HUNGRY
        data = np.full(HUNGRY.numel, self.rank + 1, np.float32)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        self.say("fault", time.monotonic())
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), hard))
        try:
            self.group._core.all_reduce_coded(data, HUNGRY.codec, average=False)
            self.group.completed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
