"""The interface that runs a benchmark's operations; `backends.py` lists the implementations."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pycomm.bench.ops.cases import Array, Case, Run


class BackendCalls(ABC):
    """One way to run every operation of :mod:`pycomm.bench.ops.operations`."""

    name: str
    has_codecs = False

    def buffers(self, case: Case) -> tuple[Array, Array]:
        """Return zeroed input and output buffers for `case`; the same array if it is in place."""
        return case.buffers()

    def refuses(self, case: Case) -> str:
        """Return why this backend cannot run the case; empty if it can."""
        return ""

    @abstractmethod
    def prepare(self, case: Case, x: Array, y: Array, codec: str = "none") -> Run:
        """Return a callable that runs the operation once, from `x` to `y`, with all set-up done."""

    def push(self, *arrays: Array) -> None:  # noqa: B027 (most have no copies)
        """Bring what is in arrays of `buffers` to the copies that `prepare` has made of them."""

    def pull(self, *arrays: Array) -> None:  # noqa: B027
        """Bring what is in the copies to the arrays."""

    def event_time(self, run: Run) -> float | None:
        """Return the median of the calls of what `prepare` has returned, by the device's own clock,
        in us; None: it has none."""
        return None

    @abstractmethod
    def sent_bytes(self) -> int | None:
        """Return the bytes this rank has sent since the start; None if they are not counted."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def close(self) -> None: ...
