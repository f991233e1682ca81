"""Progress of the ranks under a quorum, and the thread of each rank that exchanges it.

docs/local_sgd.md, "Slow and spare ranks", describes the protocol. Each rank has a thread that
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
from dataclasses import astuple, dataclass
from functools import partial

import torch
import torch.distributed as dist

from pycomm.local_sgd.outer import Values
from pycomm.local_sgd.shared import Average, is_finite
from pycomm.policy.exchange import gather
from pycomm.reduction import own_group

PERIOD = 0.02
"""Seconds between two looks at the progress of all ranks."""


@dataclass(frozen=True)
class Progress:
    """What a rank tells the others of itself."""

    offered: bool
    """It has an outer gradient to contribute."""
    weight: float
    """Samples, tokens or steps of that outer gradient."""
    finite: bool
    """That outer gradient is finite."""
    finishing: bool
    """It trains no further, and waits for the others."""
    clock: float
    """Its time in seconds; only the first rank's is used."""
    loads: int = 0
    """How often it has loaded a state."""


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
    """The end of a round; the average is equal on all ranks."""

    average: Average | None
    """None: no rank had anything to contribute."""
    offer: Offer | None
    """What this rank has contributed; None: it was late."""
    last: bool
    """All ranks have finished."""


@dataclass(frozen=True, eq=False)
class Offer:
    """A rank's outer gradient, and what it weighs."""

    gradient: Values
    weight: float
    finishing: bool
    """The rank trains no further."""


class ProgressThread:
    """The thread of this rank that takes part in all exchanges.

    It runs from `start` to the last outcome, to `close`, or to an error.

    Args:
        group: a group that nothing else uses, which `close` ends.
        device: a device whose tensors the group moves.
        exchange: function that averages outer gradients; called on the thread, by all ranks
            together. It gets that of this rank, None if it does not take part, and the weights of
            all.
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
        self._wanted = self._closed = self._runs = False
        self._outcomes: deque[Outcome] = deque()
        self._error: BaseException | None = None
        self._loads = 0
        # Held from the look at the ranks to the end of what follows from it, and by a load.
        self._exchanging = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pycomm-quorum", daemon=True)
            self._runs = True
            self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether this rank should offer what it has, since enough others have."""
        return self._wanted

    def offer(self, gradient: Values, weight: float, *, finishing: bool) -> None:
        """Offer an outer gradient of this rank for the round; there is no other offer."""
        with self._changed:
            self._offer = Offer(gradient, weight, finishing)
            self._changed.notify_all()

    def take(self, *, wait: bool = False) -> Outcome | None:
        """Return the next outcome; None: there is none yet.

        Args:
            wait: wait for one. The thread's collectives have the group's deadline.

        Raises:
            Error: an exchange has failed, such as by the death of a rank, which the text names.
        """
        with self._changed:
            if wait:
                there = partial(
                    self._changed.wait_for, lambda: self._outcomes or self._error is not None
                )
                own_group.wait(there, self._group)
            if self._outcomes:
                return self._outcomes.popleft()
            if self._error is not None:
                raise self._error
            return None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While this rank loads a state no exchange runs, and none until all have loaded theirs.

        The offer and the outcomes from before the load are dropped: other ranks may have taken
        theirs.
        """
        with self._exchanging:
            yield
            with self._changed:
                self._loads += 1
                self._offer, self._wanted = None, False
                self._outcomes.clear()

    def join(self) -> None:
        """Wait for the thread, which ends after the last outcome."""
        if self._thread is not None:
            own_group.wait(self._thread.join, self._group)
            self._thread = None

    def close(self) -> None:
        """End the thread, where it is, and the group."""
        with self._changed:
            self._closed, runs = True, self._runs
            self._changed.notify_all()
        if not runs:
            own_group.close(self._group)

    def _run(self) -> None:
        try:
            while self._take_part():
                pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        with self._changed:
            self._runs = False
        if self._closed:
            own_group.close(self._group)

    def _take_part(self) -> bool:
        """Run one round to its end; return whether another follows."""
        rule = Round(self._quorum, self._grace)
        while not self._closed:
            with self._exchanging:
                offer, ranks = self._look()
                if rule.closes(ranks):
                    return self._end_round(offer, ranks)
                self._wanted = rule.is_wanted(ranks)
            with self._changed:
                if self._offer is offer and not self._closed:
                    self._changed.wait(PERIOD)
        return False

    def _look(self) -> tuple[Offer | None, list[Progress]]:
        """Return this rank's offer, and the progress of all ranks."""
        with self._changed:
            offer, loads = self._offer, self._loads
        mine = Progress(
            offered=offer is not None,
            weight=0.0 if offer is None else offer.weight,
            finite=offer is None or is_finite(offer.gradient),
            finishing=offer is not None and offer.finishing,
            clock=time.monotonic(),
            loads=loads,
        )
        rows = gather(list(map(float, astuple(mine))), self._group, self._device)
        ranks = [
            Progress(bool(offered), weight, bool(finite), bool(finishing), clock, int(loads))
            for offered, weight, finite, finishing, clock, loads in rows
        ]
        return offer, ranks

    def _end_round(self, offer: Offer | None, ranks: Sequence[Progress]) -> bool:
        """Average what the ranks have offered; return whether another round follows."""
        weights = [rank.weight if rank.offered else 0.0 for rank in ranks]
        average = None
        if any(weights):
            values = self._exchange(None if offer is None else offer.gradient, weights)
            bad = [rank for rank, each in enumerate(ranks) if not each.finite]
            average = Average(values, tuple(bad))
        last = all(rank.finishing and rank.offered for rank in ranks)
        with self._changed:
            self._wanted = False
            if offer is not None:
                self._offer = None
            self._outcomes.append(Outcome(average, offer, last))
            self._changed.notify_all()
        return not last
