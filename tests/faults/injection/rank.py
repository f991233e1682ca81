"""What a rank of a case does: it joins, calls, fails or sees another one fail, and goes on."""

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

from tests.faults.injection.case import FROM_OUTSIDE, HUNGRY, NETWORK, Call, Case
from tests.faults.injection.groups import CoreGroup, Place, TorchGroup, make_group

SETTLE = 2.0
"""Seconds in which threads and files that are on their way out may go. Torch's never do."""
SLOW = 0.15
"""Seconds that a slow rank sleeps."""


class Injected(Exception):
    """The exception that a case throws into its victim."""


def held() -> dict[str, int]:
    """Count what a group may leave behind in this process."""
    gc.collect()
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files[name] = os.readlink(f"/proc/self/fd/{name}")
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(target.startswith("socket:") for target in files.values()),
        "files": sum(not target.endswith("/fd") for target in files.values()),
        "shared mappings": sum("memfd:" in line for line in maps.splitlines()),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }


def leaks(before: dict[str, int], limit: float) -> dict[str, int]:
    """What is there now and was not before, after a moment to settle."""
    end = time.monotonic() + limit
    while True:
        now = held()
        more = {what: n - before[what] for what, n in now.items() if n > before[what]}
        if not more or time.monotonic() > end:
            return more
        time.sleep(0.005)


def cut_sockets(rng: random.Random) -> None:
    """Cut our TCP connections: in both directions, or so that we hear and are not heard."""
    way = rng.choice((socket.SHUT_RDWR, socket.SHUT_WR))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as twin:
                    if twin.family in (socket.AF_INET, socket.AF_INET6):
                        twin.shutdown(way)


class Rank:
    """One rank. `say(word, **facts)` tells the runner."""

    def __init__(self, case: Case, rank: int, folder: str, say: Any) -> None:
        self.case, self.rank, self.folder, self.say = case, rank, folder, say
        self.is_victim = rank == case.victim
        self.now: Call | None = None
        self.group: CoreGroup | TorchGroup | None = None
        self.due = float("inf")  # of a fault that we bring about ourselves
        self.aborted = False

    def join(self, name: str) -> CoreGroup | TorchGroup:
        case = self.case
        place = Place(
            case.world,
            self.folder,
            name,
            self.rank,
            case.ranks,
            case.transport,
            case.meeting,
            apart=case.fault in NETWORK,
        )
        return make_group(place, parent=self.group)

    def main(self) -> None:
        """Play the case; tell what came of it."""
        before = held()
        facts: dict[str, Any] = {}
        first: CoreGroup | TorchGroup | None = None
        try:
            if self.case.phase != "init":
                first = self.group = self.join("first")
                self.run(Call("all_reduce", 10))
            self.say("ready", before=time.monotonic())
            self.arm()
            if self.group is None or self.case.phase == "split":
                self.group = self.join("second")
                if self.aborted:  # the first group, when this one was made already
                    self.group.abort("somebody pressed stop")
            self.group.set_timeout(self.case.timeout)
            self.operate()
        except Injected:
            self.group = None
            gc.collect()
            first = None
            return
        except Exception as error:
            facts = self.tell(error)
        self.say("over", at=time.monotonic(), **facts)
        for group in (self.group, first):
            if group is not None:
                group.close()
        self.group = first = None
        self.say(
            "left",
            leaks=leaks(before, SETTLE if self.case.world == "core" else 0.0),
            at=time.monotonic(),
        )

    def tell(self, error: Exception) -> dict[str, Any]:
        """The facts of an error. The error itself, with its frames, must not outlive the call."""
        return {
            "error": type(error).__name__,
            "named": getattr(error, "rank", None),
            "text": str(error)[:1500],
            "op": self.now.op if self.now else "",
            "seq": self.group.completed + 1 if self.group else 0,
        }

    # ------------------------------------------------------------------ the calls

    def run(self, call: Call) -> None:
        assert self.group is not None
        self.now = call
        if not self.group.call(call, self.case.async_op):
            raise AssertionError(f"rank {self.rank}: a wrong result of {call}")
        self.now = None

    def operate(self) -> None:
        """Call until something happens; in shutdown, and where all go on, to an end."""
        case = self.case
        if case.phase == "shutdown":
            self.run(case.calls[0])
            return
        lasts = case.fault in ("slow", "memory", "socket")
        for number in itertools.count():
            if self.is_victim and time.monotonic() >= self.due:
                self.due = float("inf")
                self.fail()
            if number != case.without_memory_at:
                self.run(case.calls[number % len(case.calls)])
            elif self.is_victim:
                self.call_without_memory()
            else:
                self.run(HUNGRY)
            # All ranks leave after the same call: one of them says when.
            if lasts and number % 16 == 15 and self.enough():
                return

    def enough(self) -> bool:
        """Whether the time of a case without an error is over, on all ranks alike."""
        assert isinstance(self.group, CoreGroup)
        import numpy as np

        over = np.array([time.monotonic() - self.started > 0.05 + SLOW], np.float32)
        self.group._core.all_reduce(over, "min")
        self.group.completed += 1
        return bool(over[0])

    # ------------------------------------------------------------------ the fault

    def arm(self) -> None:
        """Have the fault happen when it is due, if it is ours and we are to bring it about."""
        self.started = time.monotonic()
        case = self.case
        if not self.is_victim or case.fault in (*FROM_OUTSIDE, "memory"):
            return
        if case.fault in ("_exit", "socket", "abort"):  # wherever we are

            def happen() -> None:
                time.sleep(case.delay)
                self.fail()

            threading.Thread(target=happen, daemon=True).start()
        else:
            self.due = self.started + case.delay

    def fail(self) -> None:
        case = self.case
        self.say("fault", at=time.monotonic())
        if case.fault == "_exit":
            os._exit(3)
        if case.fault == "exit":
            sys.exit(3)
        if case.fault == "raise":
            raise Injected("the user's code has failed")
        if case.fault == "socket":
            cut_sockets(random.Random(case.how))
        elif case.fault == "slow":
            time.sleep(SLOW)
        elif case.fault == "abort":
            assert self.group is not None
            self.aborted = True
            self.group.abort("somebody pressed stop")

    def call_without_memory(self) -> None:
        """Make the call that needs memory where there is none to be had."""
        import numpy as np

        assert isinstance(self.group, CoreGroup)
        self.now = HUNGRY
        data = np.full(HUNGRY.numel, self.rank + 1, np.float32)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        self.say("fault", at=time.monotonic())
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), hard))
        try:
            self.group._core.all_reduce_coded(data, HUNGRY.codec, average=False)
            self.group.completed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def wait_for(file: Path) -> None:
    """Wait until somebody has made a file."""
    end = time.monotonic() + 10
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no {file.name}")
        time.sleep(0.005)


def go_on(case: Case, rank: int, folder: str) -> float:
    """Make a group of those that are left and reduce over it; return the seconds it took."""
    left = [r for r in range(case.ranks) if r not in case.leavers]
    start = time.monotonic()
    group = make_group(
        Place(case.world, folder, "after", left.index(rank), len(left), case.transport, 8.0)
    )
    if not group.call(Call("all_reduce", 1000), False):
        raise AssertionError("the new group's result is wrong")
    took = time.monotonic() - start
    group.close()
    return took
