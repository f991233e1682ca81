"""The stream on which buckets of a device are reduced, and what the device knows about steps there.

Whether a step's result is finite decides which residuals are current, and the host learns it late:
a host that runs ahead would have to wait, or would use what another rank does not know yet. So
residuals are committed as if every step were finite, and a flag on the device says whether their
sides are the other way round than the host believes (`swapped`). The kernels read it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_ROOM = 64  # of steps of which the host has not heard yet


def new_stream(device: torch.device) -> torch.Stream:
    """Return a stream of high priority."""
    return torch.Stream(device, priority=-1)


class SideStream:
    """A stream for work that backward's stream does not wait for.

    Work is queued by the thread that calls, and in its order: it may call a process group, as any
    code of that thread may.

    Args:
        device: a device that is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = new_stream(device)
        with self.stream:
            self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
            """Not 0: the current step's result is not finite."""
            self.swapped = torch.zeros_like(self.found_inf)
            """Not 0: of the steps that were deferred since the host knew, an odd number was not
            finite."""
        self.flags: dict[str, Any] = {"found_inf": self.found_inf, "swapped": self.swapped}
        """Arguments of `two_shot.all_reduce`."""
        self.open = False
        """The current step has written `found_inf`."""
        self.ahead: set[str] | None = None
        """The parameters of the steps that were deferred since `settle`; None: there are none."""
        # Of which the host has not heard: its copy of `found_inf`, and when that is there.
        self._deferred: deque[tuple[torch.Tensor, torch.Event]] = deque()

    def read(self, flag: torch.Tensor) -> bool:
        """Return a flag (one value) that work here has computed; waits for that work alone."""
        with self.stream:
            return bool(flag)

    def end_step(self) -> bool:
        """End the current step; return whether its result is finite, for which the host waits."""
        self.open = False
        found = self.read(self.found_inf)
        if found:
            with self.stream:
                self.found_inf.zero_()
        return not found

    def defer(self, names: set[str]) -> None:
        """End the current step, of these parameters, and let the device decide about it."""
        self.open, self.ahead = False, names
        copy = torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=True)
        with self.stream:
            copy.copy_(self.found_inf, non_blocking=True)
            torch.logical_xor(self.swapped, self.found_inf, out=self.swapped)
            self.found_inf.zero_()
            event = torch.Event(self.found_inf.device)
            event.record(self.stream)
        self._deferred.append((copy, event))

    @property
    def is_full(self) -> bool:
        """Whether the host should wait before another step is deferred."""
        return len(self._deferred) >= _ROOM

    def hear(self) -> int:
        """Return how many of the deferred steps that have ended since were not finite."""
        overflows = 0
        while self._deferred and self._deferred[0][1].query():
            copy, _ = self._deferred.popleft()
            overflows += float(copy) != 0
        return overflows

    def settle(self) -> set[str]:
        """Wait for all deferred steps; return the parameters whose sides were swapped, and no
        longer are."""
        names, self.ahead = self.ahead or set(), None
        if not self.read(self.swapped):
            return set()
        with self.stream:
            self.swapped.zero_()
        return names
