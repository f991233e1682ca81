"""How the replicas of a quorum find each other's handles in the store of one of them.

A quorum may name a replica that died before it heard of it: torchft's lighthouse takes a replica
for alive until its heartbeats have been missing for some time. Such a replica publishes nothing,
and the others would wait for it until the timeout. They give up long before; the step then fails,
and the next quorum is without it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torchft.process_group import create_store_client

from pycomm.errors import Error, PeerLost, Timeout

UNKNOWN_MEMBER_TIMEOUT = 5.0
"""Seconds that members of a former group wait at first for a replica that they do not know. All of
one quorum hear of it at the same time. It doubles with each meeting that fails, so that slow
replicas meet in the end."""
_SUCCESSOR = 0.5  # seconds for a replica that has taken the place of one that is gone
_LOOK = 0.1  # seconds between two looks for former members that are gone
_PAUSES = (0.001, 0.05)  # seconds between two polls of the store, at first and at most
_COMMIT = "commit"


class QuorumRendezvous:
    """The meetings of one replica, one for each quorum.

    Args:
        handle: this replica's handle.
        is_gone: whether the process of a handle has ended.
    """

    def __init__(self, handle: str, is_gone: Callable[[str], bool]) -> None:
        self._handle, self._is_gone = handle, is_gone
        self._known: set[str] = set()  # handles of the others of the last group that was formed
        self._new = True  # no group was formed yet
        self._failed = 0  # meetings in a row

    def formed(self, handles: Iterable[str]) -> None:
        """Note the members of the group that was formed."""
        self._known = set(handles) - {self._handle}
        self._failed, self._new = 0, False

    def handles(self, store_addr: str, rank: int, size: int, timeout: timedelta) -> list[str]:
        """Publish this replica's handle, and return all, by rank.

        Either all replicas that are there return the same list, or all of them raise.

        Args:
            store_addr: of the quorum, "host:port/prefix", with a prefix that is new.
            rank: of this replica.
            size: how many there are.
            timeout: for the whole.

        Raises:
            PeerLost: a replica is gone.
            Timeout: a replica did not come in time.
            Error: another replica has given up; the text has its reason.
        """
        self._failed += 1  # until formed() is called
        if size == 1:
            return [self._handle]
        limit = timeout.total_seconds()
        start = time.monotonic()
        store = _open(store_addr, timeout)
        keys = [f"pycomm/handle/{r}" for r in range(size)]
        store.set(keys[rank], self._handle)
        found, pause, next_look = {rank: self._handle}, _PAUSES[0], _LOOK
        problem: Error | None = None
        while len(found) < size and problem is None:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
            for r in range(size):
                if r not in found and store.check([keys[r]]):
                    found[r] = store.get(keys[r]).decode()
            waited = time.monotonic() - start
            if store.check(["pycomm/decision"]):
                break
            if waited >= next_look and len(found) < size:
                next_look = waited + _LOOK
                problem = self._problem(found, rank, size, waited, limit)
        decision = _COMMIT if problem is None else str(problem)
        decision = store.compare_set("pycomm/decision", "", decision).decode()
        if decision != _COMMIT:
            # Wait longer for the replacement of a dead member.
            absent = self._known - set(found.values())
            self._known -= {other for other in absent if self._is_gone(other)}
            raise problem or Error(f"another replica has given up: {decision}")
        return [store.get(key).decode() for key in keys]

    def _problem(
        self, found: dict[int, str], rank: int, size: int, waited: float, limit: float
    ) -> Error | None:
        if waited < _SUCCESSOR:
            return None
        absent = [r for r in range(size) if r not in found]
        former = self._known - set(found.values())
        who = f"rank {rank}: replica {absent[0]} of {size} in this quorum"
        gone = sum(map(self._is_gone, former))
        successors = len(set(found.values()) - self._known)
        all_dead_replaced = gone <= successors and len(absent) <= len(former) - gone
        if gone and not all_dead_replaced:
            return PeerLost(
                f"{who} has published no handle, and the process of a former member is gone; the "
                "next quorum is without it",
                absent[0],
            )
        patience = min(UNKNOWN_MEMBER_TIMEOUT * 2 ** min(self._failed - 1, 10), limit)
        if self._new or len(absent) <= len(former):  # they are alive, as far as can be told
            patience = limit
        if waited < patience:
            return None
        return Timeout(
            f"{who} has published no handle: timeout after {1000 * patience:g}ms (of at most "
            f"{1000 * limit:g}ms): it died as the quorum was found, or is slow; the next quorum is "
            "waited for longer"
        )


def _open(store_addr: str, timeout: timedelta) -> Any:
    """Return a client of a quorum's store, which was there before the quorum.

    torch's client would try again until the timeout if nobody listens.
    """
    host, _, port = store_addr.partition("/")[0].rpartition(":")
    refused: OSError | None = None
    for pause in (0.0, 0.05, 0.1):  # a full queue of a busy server may refuse, too
        time.sleep(pause)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout.total_seconds()):
                return create_store_client(store_addr, timeout=timeout)
        except ConnectionRefusedError as error:
            refused = error
        except TimeoutError as error:
            raise Timeout(
                f"{host}:{port}, where the replica that lends its store for this quorum should "
                f"be, does not answer: timeout after {1000 * timeout.total_seconds():g}ms; its "
                "machine may be gone, or the network"
            ) from error
    raise Error(
        f"nobody listens at {host}:{port}, where the replica that lends its store for this quorum "
        "should be: its process is gone; the next quorum is without it"
    ) from refused
