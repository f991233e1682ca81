"""Ranks for tests of stores and transports: threads of this process, or forked processes."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pycomm import _C, _test
from tests.ranks import attempt, good, in_processes, run

SECONDS = 30.0  # far beyond what any step needs; a test that waits this long has failed
COLLECTIVE, POINT_TO_POINT = 0, 1
# An address of this host beside those of loopback, if it has one: payloads that travel by it are
# checked.
OUTER = next((ip for name, ip in _C.interfaces() if name != "lo" and ":" not in ip), None)
OUTSIDE = {"interface": OUTER} if OUTER else {}
INSIDE = {"interface": "lo"}


@dataclass
class Rank:
    """One rank and its transport."""

    rank: int
    size: int
    transport: Any
    buffers: list[Any] = field(default_factory=list)  # keep the memory of queued operations alive

    @property
    def peers(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def send(
        self, peer: int, data: bytes, tag: Any, lane: int = COLLECTIVE
    ) -> tuple[Any, int, int]:
        """Queue a message; return what `wait` takes."""
        buffer = ctypes.create_string_buffer(data, len(data) + 1)
        self.buffers.append(buffer)
        channel = self.transport.channel(peer, lane)
        return channel, channel.send(tag, ctypes.addressof(buffer), len(data)), 0

    def recv(self, peer: int, size: int, tag: Any, lane: int = COLLECTIVE) -> tuple[Any, Any]:
        """Queue a receive; return what `wait` takes, and a function that returns the bytes."""
        buffer = ctypes.create_string_buffer(b"\xa5" * size, size + 1)
        self.buffers.append(buffer)
        channel = self.transport.channel(peer, lane)
        ticket = channel.recv(tag, ctypes.addressof(buffer), size)
        return (channel, 0, ticket), lambda: buffer.raw[:size]

    def wait(self, *goals: Any, lane: int = COLLECTIVE, timeout: float = SECONDS) -> None:
        self.transport.wait(lane, list(goals), timeout)

    def exchange(
        self, data: dict[int, bytes], tag: Any, lane: int = COLLECTIVE
    ) -> dict[int, bytes]:
        """Send each peer its bytes, and receive as many from each."""
        goals, results = [], {}
        for peer, payload in data.items():
            goal, results[peer] = self.recv(peer, len(payload), tag, lane)
            goals += [goal, self.send(peer, payload, tag, lane)]
        self.wait(*goals, lane=lane)
        return {peer: result() for peer, result in results.items()}


Body = Callable[[Rank], Any]


def tag(seq: int = 1, numel: int = 0, op: str = "all_reduce", **more: Any) -> Any:
    return _test.OpTag(op, seq=seq, numel=numel, **more)


def pattern(size: int, seed: int) -> bytes:
    """Return bytes that differ between seeds and between positions."""
    period = bytes((i * 7 + i // 251 + seed * 31) & 255 for i in range(min(size, 4093)))
    return (period * (size // 4093 + 1))[:size]


@contextmanager
def transport(store: Any, rank: int, size: int, *, kind: str, **options: Any) -> Iterator[Rank]:
    """Make a rank of a group, whose transport is closed at the end."""
    made = _test.Transport(kind, store, "group", rank, size, **{"timeout": SECONDS, **options})
    try:
        yield Rank(rank, size, made)
    finally:
        made.close()


def threads(
    size: int, body: Body, *, kind: str = "tcp", errors: bool = False, options: Any = None
) -> list[Any]:
    """Run `body` on ranks that are threads; return the results in the order of ranks.

    Args:
        options: keyword arguments of the transport, or a function from the rank to them.
        errors: return ranks' exceptions as their results, instead of raising the first.
    """
    of_rank = options if callable(options) else lambda rank: options or {}
    how = {"limit": 10 * SECONDS, "member": transport, "of_rank": of_rank, "kind": kind}
    return (attempt if errors else run)(size, body, **how)


def processes(
    size: int,
    body: Body,
    *,
    kind: str = "shm",
    options: Any = None,
    errors: bool = False,
    prepare: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """Run `body` as `threads` does, on forked processes with a file store; dead ranks give None.

    ``prepare(rank)`` runs in the process before the rendezvous.
    """

    def target(rank: int) -> Any:
        prepare(rank)
        try:
            with transport(_C.Store.file(folder), rank, size, kind=kind, **(options or {})) as me:
                return body(me)
        except BaseException as error:
            return error

    with tempfile.TemporaryDirectory() as folder:
        outcomes = in_processes(size, target, 10 * SECONDS)
    return outcomes if errors else good(outcomes)
