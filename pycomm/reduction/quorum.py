"""Quorum: outer steps of `pycomm.LocalSGD` that need not wait for the slowest ranks.

docs/reliability.md, "Slow and spare ranks", describes the protocol. Each rank has a thread that
takes part in all exchanges, so a rank in the middle of a local step holds up nobody. The threads
tell each other the progress of their ranks again and again by a small all-gather; all of them see
the same numbers and draw the same conclusion, `Round.closes`, so no rank leads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pycomm.policy.exchange import gather
from pycomm.reduction.outer import Values

PERIOD = 0.02
"""Seconds between two looks at the progress of all ranks."""


@dataclass(frozen=True)
class Progress:
    """What a rank tells the others of itself."""

    offered: bool
    """It has a movement to contribute."""
    weight: float
    """Samples, tokens or steps of that movement."""
    finishing: bool
    """It trains no further, and waits for the others."""
    clock: float
    """Its time in seconds; only the first rank's is used."""
    loads: int = 0
    """How often it has loaded a state."""

    def row(self) -> list[float]:
        return [float(self.offered), self.weight, float(self.finishing), self.clock, self.loads]

    @classmethod
    def of(cls, row: Sequence[float]) -> Progress:
        return cls(bool(row[0]), row[1], bool(row[2]), row[3], int(row[4]))


class Round:
    """The rule by which a round ends, from what all ranks have told each other.

    Args:
        quorum: number of ranks that are enough.
        grace: seconds for which the others are awaited once there are enough.
    """

    def __init__(self, quorum: int, grace: float) -> None:
        self._quorum, self._grace = quorum, grace
        self._since: float | None = None  # by the first rank's clock

    def is_wanted(self, ranks: Sequence[Progress]) -> bool:
        """Whether enough ranks have offered, so that the others should offer what they have."""
        training = sum(not rank.finishing for rank in ranks)
        there = sum(rank.offered and not rank.finishing for rank in ranks)
        return there >= max(1, min(self._quorum, training))

    def closes(self, ranks: Sequence[Progress]) -> bool:
        """Whether the round ends now; the ranks that have offered take part in it."""
        if any(rank.loads != ranks[0].loads for rank in ranks):
            return False  # some still have the state from before a checkpoint
        if all(rank.finishing and rank.offered for rank in ranks):
            return True
        if not self.is_wanted(ranks):
            return False
        if all(rank.offered or rank.finishing for rank in ranks):
            return True
        if self._since is None:
            self._since = ranks[0].clock
        return ranks[0].clock - self._since >= self._grace


@dataclass(frozen=True)
class Outcome:
    """An outer gradient, equal on all ranks."""

    gradient: Values | None
    """None: no rank had anything to contribute."""
    offer: Offer | None
    """What this rank has contributed; None: it was late."""
    last: bool
    """All ranks have finished."""


@dataclass(frozen=True, eq=False)
class Offer:
    """A rank's movement, and what it weighs."""

    moved: Values
    weight: float


class Quorum:
    """This rank's side of the exchanges, and the thread that runs them.

    Args:
        group: a group that nothing else uses.
        device: a device whose tensors the group moves.
        exchange: function that averages movements; called on the thread, by all ranks together. It
            gets the movement of this rank, None if it does not take part, and the weights of all.
        quorum, grace: see `Round`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        exchange: Callable[[Values | None, list[float]], Values],
        quorum: int,
        grace: float,
    ) -> None:
        self._group, self._device, self._exchange = group, device, exchange
        self._quorum, self._grace = quorum, grace
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._wanted = self._finishing = False
        self._outcomes: deque[Outcome] = deque()
        self._error: BaseException | None = None
        self._loads = 0
        self._meeting = threading.Lock()  # held by an exchange, and while a state is loaded
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pycomm-quorum", daemon=True)
            self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether this rank should offer what it has, since enough others have."""
        return self._wanted

    def offer(self, moved: Values, weight: float, *, finishing: bool = False) -> None:
        """Offer a movement of this rank for the round; there is no other offer."""
        with self._changed:
            self._finishing = finishing
            self._offer = Offer(moved, weight)
            self._changed.notify_all()

    def take(self, *, wait: bool = False) -> Outcome | None:
        """Return the next outer gradient; None: there is none yet.

        Args:
            wait: wait for one. The thread's collectives have the group's deadline.

        Raises:
            Error: an exchange has failed, such as by the death of a rank, which the text names.
        """
        with self._changed:
            while wait and not self._outcomes and self._error is None:
                self._changed.wait()
            if self._outcomes:
                return self._outcomes.popleft()
            if self._error is not None:
                raise self._error
            return None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While this rank loads a state no exchange runs, and none until all have loaded theirs."""
        with self._meeting:
            yield
            with self._changed:
                self._loads += 1

    def join(self) -> None:
        """Wait for the thread, which ends after the last outcome."""
        if self._thread is not None:
            self._thread.join()
            self._thread, self._finishing = None, False

    def _run(self) -> None:
        try:
            while self._one_round():
                pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _one_round(self) -> bool:
        """Run one round to its end; return whether another follows."""
        rule = Round(self._quorum, self._grace)
        while True:
            with self._changed:
                offer, finishing, loads = self._offer, self._finishing, self._loads
            weight = 0.0 if offer is None else offer.weight
            mine = Progress(offer is not None, weight, finishing, time.monotonic(), loads)
            rows = gather(mine.row(), self._group, self._device)
            ranks = [Progress.of(row) for row in rows]
            if rule.closes(ranks):
                break
            self._wanted = rule.is_wanted(ranks)
            with self._changed:
                if self._offer is offer:
                    self._changed.wait(PERIOD)
        weights = [rank.weight if rank.offered else 0.0 for rank in ranks]
        gradient = None
        if any(weights):
            with self._meeting:
                gradient = self._exchange(None if offer is None else offer.moved, weights)
        last = all(rank.finishing and rank.offered for rank in ranks)
        with self._changed:
            self._wanted = False
            if offer is not None:
                self._offer = None
            self._outcomes.append(Outcome(gradient, offer, last))
            self._changed.notify_all()
        return not last
