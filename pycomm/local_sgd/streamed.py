"""Forms of exchange of `pycomm.LocalSGD`: `Blocking` and `Streamed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from pycomm.arguments import number, put, whole
from pycomm.local_sgd.outer import Fragment
from pycomm.local_sgd.shared import Average, SharedModel, copies
from pycomm.reduction import own_group


@dataclass(frozen=True)
class Streamed:
    """Parts of the model travel one after the other, while training goes on (Streaming DiLoCo).

    An overlapped rank differs from the others between rounds; `LocalSGD.finish` makes all equal.
    One fragment with ``overlap=every`` is DiLoCo whose outer gradients come one round later.

    Args:
        fragments: number of parts of the model, of about equal size, that are averaged one after
            the other in each round: a fragment every ``every / fragments`` steps.
        overlap: local steps during which a fragment's outer gradient travels, at most
            ``every // fragments``; 0: training stops meanwhile.
        mixing: share of a rank's own parameters that it keeps when an overlapped outer gradient is
            applied, from 0 to below 1: ``mixing * own + (1 - mixing) * common``.

    Raises:
        TypeError: an option has another type.
        ValueError: an option is out of its range.

    Example:
        >>> from pycomm.local_sgd import Streamed
        >>> stream = Streamed(fragments=6, overlap=5)
        >>> local = pycomm.LocalSGD(model, every=30, exchange=stream)  # doctest: +SKIP
    """

    fragments: int = 1
    overlap: int = 1
    mixing: float = 0.5

    def __post_init__(self) -> None:
        put(
            self,
            fragments=whole("fragments", self.fragments, 1),
            overlap=whole("overlap", self.overlap),
            mixing=number("mixing", self.mixing),
        )
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing={self.mixing}: use a share from 0 to below 1")

    def check(self, every: int) -> None:
        """Check these options against the steps of a round.

        Raises:
            ValueError: there are more fragments or steps of overlap than a round has steps for.
        """
        if self.fragments > every:
            raise ValueError(
                f"LocalSGD: fragments={self.fragments}: use 1 to every={every}, since each takes a "
                "step of its own"
            )
        if self.overlap > every // self.fragments:
            raise ValueError(
                f"LocalSGD: overlap={self.overlap} is more than every // fragments = "
                f"{every // self.fragments}: the next fragment would be due before it came"
            )

    def needs_own_group(self, *, is_async: bool) -> bool:
        """Whether exchanges run on a thread, with a group that nothing else uses.

        Args:
            is_async: the group runs exchanges of this kind on a thread of its own.
        """
        return self.overlap > 0 and not is_async

    def start(self, shared: SharedModel, every: int, own: dist.ProcessGroup | None) -> Stream:
        """Return the rounds of this exchange.

        Args:
            shared: the model.
            every: local steps in a round.
            own: the group of `needs_own_group`, if there is one.
        """
        return Stream(shared, every, self.overlap, self.mixing, own)


@dataclass(frozen=True)
class Blocking(Streamed):
    """Training stops while the outer gradients of the whole model travel: DiLoCo."""

    fragments: int = field(default=1, init=False, repr=False)
    overlap: int = field(default=0, init=False, repr=False)
    mixing: float = field(default=0.0, init=False, repr=False)


class Stream:
    """Rounds in which the fragments are averaged one after the other, by all ranks alike.

    Ranks need not take equally many steps, as under a GradScaler: the n-th exchange of each is with
    the n-th of the others, and who has finished takes part until all have.

    Args:
        shared: the model.
        every: local steps in a round.
        overlap, mixing: see `Streamed`.
        own: a group for a thread that runs the exchanges; None: they need no thread.
    """

    def __init__(
        self,
        shared: SharedModel,
        every: int,
        overlap: int,
        mixing: float,
        own: dist.ProcessGroup | None,
    ) -> None:
        self._shared, self._every, self._overlap, self._mixing = shared, every, overlap, mixing
        self._own = own
        self._thread = ThreadPoolExecutor(1, "pycomm-local-sgd") if own is not None else None
        self.local_steps = 0
        self._in_flight: tuple[Fragment, Callable[[], Average]] | None = None
        self._countdown = 0  # steps until what is in flight is applied
        self._dirty = False  # the model differs from the common start

    def step(self, weight: float) -> bool:
        """Count a step of this weight; return whether it ended a round."""
        self.local_steps += 1
        self._dirty = True
        for part in self._shared.parts:
            part.weight += weight
        if self._in_flight is not None:
            self._countdown -= 1
            if not self._countdown:
                self._apply()
        for part in self._shared.parts:
            if part.end == self.local_steps:
                self._end(part)
        if self.local_steps < self._every:
            return False
        self.local_steps = 0
        return True

    def finish(self) -> None:
        """Apply and exchange what is left, until all ranks have finished."""
        self._apply()
        all_finish = False
        while not all_finish:
            part, changed = self._next(), self._shared.changed()
            gradient = part.gradient()
            announced = self._shared.announce(
                gradient, part.weight, changed, finishing=True, dirty=self._dirty
            )
            all_finish = all(rank.finishing for rank in announced())
            if all_finish and not any(rank.dirty for rank in announced()):
                break
            self._catch_up(part, self._shared.average(part, gradient, announced))
        else:
            for _ in self._shared.parts[1:]:
                self._catch_up(self._next(), self._exchange(self._next()))
        self.local_steps, self._dirty = 0, False

    def _next(self) -> Fragment:
        """Return the fragment whose turn it is; the first one where a round ended by an error."""
        parts = self._shared.parts
        return next((part for part in parts if part.end > self.local_steps), parts[0])

    def _catch_up(self, part: Fragment, wait: Callable[[], Average]) -> None:
        """Apply a fragment's average at once, and go on as if its step of the round had come."""
        part.weight = 0.0
        self._complete(part, wait)
        self.local_steps = part.end % self._every

    def _end(self, part: Fragment) -> None:
        """Send a fragment's outer gradient, and apply it at once unless it overlaps with steps."""
        wait = self._exchange(part)
        part.weight = 0.0
        if self._overlap:
            self._in_flight, self._countdown = (part, wait), self._overlap
        else:
            self._complete(part, wait)

    def _exchange(self, part: Fragment) -> Callable[[], Average]:
        """Send a fragment's outer gradient; return a function that waits for the average."""
        gradient, weight, changed = part.gradient(), part.weight, self._shared.changed()

        def exchange() -> Callable[[], Average]:
            announced = self._shared.announce(gradient, weight, changed)
            return self._shared.average(part, gradient, announced)

        if self._thread is None:
            return exchange()
        result = self._thread.submit(lambda: exchange()()).result
        return lambda: own_group.wait(result, self._own)

    def _complete(self, part: Fragment, wait: Callable[[], Average]) -> None:
        """Wait for an average, and begin the fragment's next round from its start."""
        self._shared.move(part, wait())
        part.write()
        self._dirty = len(self._shared.parts) > 1 or self._overlap > 0

    def _apply(self) -> None:
        """Apply the average that is in flight, if there is one."""
        if self._in_flight is None:
            return
        (part, wait), self._in_flight = self._in_flight, None
        if self._shared.move(part, wait()):
            part.mix(self._mixing)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state to checkpoint; it waits for what is in flight."""
        pending = None
        if self._in_flight is not None:
            part, wait = self._in_flight
            average = wait()
            self._in_flight = part, lambda: average
            values = copies(average.values)
            pending = self._shared.parts.index(part), values, average.bad, self._countdown
        return {
            "local_steps": self.local_steps,
            "dirty": self._dirty,
            "pending": pending,
            **self._shared.state_dict(dirty=self._dirty),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; what is in flight is received and dropped."""
        if self._in_flight is not None:
            self._in_flight[1]()
            self._in_flight = None
        self._shared.load_state_dict(state)
        if state["pending"] is not None:
            index, values, bad, self._countdown = state["pending"]
            average = Average(copies(values), bad)
            self._in_flight = self._shared.parts[index], lambda: average
        self.local_steps, self._dirty = state["local_steps"], state["dirty"]

    def close(self) -> None:
        """End the thread and its group, after what is in flight."""
        if self._thread is not None and self._own is not None:
            self._thread.submit(own_group.close, self._own)
            self._thread.shutdown(wait=False)
