"""Exchange of `pycomm.LocalSGD` that the fastest ranks carry: `Quorum`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pycomm.arguments import number, put, whole
from pycomm.errors import Error
from pycomm.local_sgd.outer import Values
from pycomm.local_sgd.progress import Outcome, ProgressThread
from pycomm.local_sgd.shared import SharedModel, copies
from pycomm.reduction.weights import factors


@dataclass(frozen=True)
class Quorum:
    """The fastest ranks end a round; what late ranks have done joins the next one.

    An outer gradient weighs as many steps, samples or tokens as it took. Ranks are in different
    rounds until `LocalSGD.finish`, which makes all equal and comes before a checkpoint. The trained
    parameters must stay the same.

    Args:
        ranks: number of ranks that end a round when each has taken `every` steps.
        grace: seconds for which others are awaited then. They offer what they have after their
            current step; what comes too late joins the next round.
        overlap: steps that a rank takes while it waits for the end of the round.

    Raises:
        TypeError: an option has another type.
        ValueError: an option is out of its range.

    Example:
        >>> from pycomm.local_sgd import Quorum
        >>> quorum = Quorum(2, grace=0.5)  # of three
        >>> local = pycomm.LocalSGD(model, every=30, exchange=quorum)  # doctest: +SKIP
    """

    ranks: int
    grace: float = 1.0
    overlap: int = 0

    fragments = 1

    def __post_init__(self) -> None:
        put(
            self,
            ranks=whole("ranks", self.ranks, 1),
            grace=number("grace", self.grace),
            overlap=whole("overlap", self.overlap),
        )
        if self.grace < 0:
            raise ValueError(f"grace={self.grace}: use seconds, 0 or more")

    def check(self, every: int, ranks: int) -> None:
        """Check these options against the number of ranks.

        Raises:
            ValueError: the quorum is of more ranks than there are.
        """
        if self.ranks > ranks:
            raise ValueError(
                f"LocalSGD: Quorum({self.ranks}): use 1 to {ranks}, the number of ranks"
            )

    def needs_own_group(self, *, is_async: bool) -> bool:
        """See `Streamed.needs_own_group`."""
        return True

    def start(self, shared: SharedModel, every: int, own: dist.ProcessGroup | None) -> QuorumRounds:
        """See `Streamed.start`."""
        return QuorumRounds(shared, every, self)


class QuorumRounds:
    """Rounds of this rank under a quorum.

    Args:
        shared: the model, in one fragment.
        every: local steps in a round.
        quorum: the options.
    """

    def __init__(self, shared: SharedModel, every: int, quorum: Quorum) -> None:
        self._shared, self._every, self._overlap = shared, every, quorum.overlap
        (self._part,) = shared.parts
        self.local_steps = self.late = 0
        self._dirty = False  # steps were taken since the last `finish`
        self._offered = False  # an offer is under way,
        self._whole = False  # of a whole round,
        self._void = False  # and the model has gone back to its start since
        group, device = shared.state.process_group, shared.state._device
        limits = quorum.ranks, quorum.grace
        self._thread = ProgressThread(group, device, self._averager(), *limits)
        self._thread.start()  # now, so that a long first step holds nobody up either

    def _averager(self) -> Callable[[Values | None, list[float]], Values]:
        """Return the thread's function, which holds the model and not these rounds."""
        shared, part = self._shared, self._part

        def average(gradient: Values | None, weights: list[float]) -> Values:
            shared.state.factors = factors(weights)
            # The offer itself is still needed, and the average is taken in place.
            own = copies(gradient) if gradient is not None else part.zeros()
            return shared.reduce(part, own)()

        return average

    def step(self, weight: float) -> bool:
        """Apply averages that have come, and offer an outer gradient if it is due."""
        self._thread.start()  # it ended with `finish`
        self.local_steps += 1
        self._part.weight += weight
        self._dirty = True
        before = self._shared.rounds
        while (outcome := self._thread.take()) is not None:
            self._come(outcome)
        whole = self.local_steps >= self._every
        if not self._offered and (whole or self._thread.wanted):
            self._offer()
            self._whole = whole
        while self._offered and self._whole and self.local_steps >= self._overlap:
            self._come(self._wait())
        return self._shared.rounds > before

    def finish(self) -> None:
        """Take part in rounds until all ranks have finished."""
        self._thread.start()
        while self._offered:
            self._come(self._wait())
        last = False
        while not last:
            if not self._offered:
                self._offer(finishing=True)
            outcome = self._wait()
            self._come(outcome)
            last = outcome.last
        self._thread.join()
        self._part.write()
        self.local_steps, self._dirty = 0, False

    def _wait(self) -> Outcome:
        outcome = self._thread.take(wait=True)
        assert outcome is not None
        return outcome

    def _offer(self, *, finishing: bool = False) -> None:
        if self._shared.differ():
            raise Error(
                "LocalSGD: parameters were unfrozen, frozen, added or replaced, which does not go "
                "with exchange=Quorum(...): ranks are in different rounds. Make a new LocalSGD "
                "after finish()"
            )
        self._thread.offer(self._part.gradient(), self._part.weight, finishing=finishing)
        self._part.weight, self.local_steps = 0.0, 0
        self._offered, self._void = True, False

    def _come(self, outcome: Outcome) -> None:
        """Apply an average; this rank may have gone on since its offer, or be late."""
        outer = self._part
        sent = outcome.offer.gradient if outcome.offer is not None else None
        if sent is None:
            self.late += 1
        else:
            self._offered = False
        if outcome.average is None:
            return
        before = copies(outer.start)
        if not self._shared.move(self._part, outcome.average):
            self._void = self._offered
        elif sent is not None and self.local_steps == 0:
            outer.write()
        else:
            outer.rebase(before, None if self._void else sent)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state to checkpoint.

        Raises:
            Error: ranks are at different steps of their own; call `finish` first.
        """
        if self._dirty:
            raise Error(
                "LocalSGD: with a quorum the ranks are in different rounds: call finish() on all "
                "ranks, then save"
            )
        return {
            "local_steps": 0,
            "dirty": False,
            "pending": None,
            **self._shared.state_dict(dirty=False),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, on all ranks; what came before it is dropped."""
        with self._thread.loading():
            self._shared.load_state_dict(state, agree=False)
            self.local_steps, self._dirty = 0, False
            self._offered = self._whole = self._void = False

    def close(self) -> None:
        """End the thread and its group."""
        self._thread.close()
