"""When a bucket passes the stages of a compressed all-reduce: the trace of `bench step --trace`.

A hook is called when backward has made a bucket ready. Then its values are encoded, scattered to
their owners, added up and encoded again there, gathered, and decoded where they land; one exchange
alone gathers. Times are those of events on the streams on which this happens; on the CPU of a
clock. The Python around the exchanges tells the stages apart: where C++ does all of it, a bucket
has one stage, `reduce`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

from pycomm.bench.common import accelerator
from pycomm.reduction import payloads
from pycomm.reduction.exchange_thread import ExchangeThread

STAGES = ("compute", "encode", "scatter", "own", "gather", "land", "reduce", "optimizer")
"""All stages, in their order."""
BY_EXCHANGES = {
    0: ("reduce",),
    1: ("encode", "gather", "land"),
    2: ("encode", "scatter", "own", "gather", "land"),
}
"""The stages of a bucket, by the number of its exchanges."""
EXCHANGES = "all_to_all", "all_gather"
"""The calls that exchange payloads."""


@dataclass(frozen=True)
class StageTime:
    """A stage of a bucket, in seconds from the beginning of the step."""

    stage: str
    bucket: int
    """its number; of the optimizer, which has none, -1"""
    begin: float
    end: float

    def row(self, method: str, rate: str) -> dict[str, Any]:
        """Return the row of a trace, of a method on links of a rate: times to a microsecond."""
        rounded = replace(self, begin=round(self.begin, 6), end=round(self.end, 6))
        return {"method": method, "rate": rate} | asdict(rounded)


class Stages:
    """Notes of a step of models whose hooks were registered within `noted`.

    Between `begin` and `end` a step is noted; all others take their own way.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._end: Any = None
        self._under_way = False
        self._buckets: list[list[Any]] = []
        """Of each: ready, begin and end of its exchanges, done."""
        self._reduced = threading.local()  # the bucket that a thread beside backward reduces

    def mark(self) -> Any:
        """Return this moment of the current stream."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = accelerator.api().Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Begin the step that is noted."""
        self._buckets.clear()
        self._under_way = True
        self._begin = self.mark()

    def end(self) -> None:
        self._end = self.mark()
        self._under_way = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Register hooks whose buckets are noted; within it the exchanges of steps are, too."""
        register = DistributedDataParallel.register_comm_hook

        def registered(model: DistributedDataParallel, state: object, hook: Any) -> None:
            register(model, state, self._hooked(hook))

        with ExitStack() as stack:
            stack.enter_context(
                patch.object(DistributedDataParallel, "register_comm_hook", registered)
            )
            run = self._run(ExchangeThread.run)
            stack.enter_context(patch.object(ExchangeThread, "run", run))
            for name in EXCHANGES:
                call = self._exchange(getattr(payloads, name))
                stack.enter_context(patch.object(payloads, name, call))
            yield

    def _hooked(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def noted(state, bucket):  # type: ignore[no-untyped-def] # DDP would check annotations
            if not self._under_way:
                return hook(state, bucket)
            marks = [self.mark()]
            self._buckets.append(marks)

            def done(future: torch.futures.Future[Any]) -> Any:
                marks.append(self.mark())  # on a stream that has waited for the result
                return future.value()

            return hook(state, bucket).then(done)

        return noted

    def _run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(thread: ExchangeThread, tensor: torch.Tensor, reduce: Callable[[], Any]) -> Any:
            if not self._under_way:
                return run(thread, tensor, reduce)
            marks = self._buckets[-1]

            def begun() -> Any:
                self._reduced.marks = marks
                return reduce()

            return run(thread, tensor, begun)

        return noted

    def _exchange(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            if not self._under_way:
                return call(*args, **options)
            marks = getattr(self._reduced, "marks", None) or self._buckets[-1]
            marks.append(self.mark())
            found = call(*args, **options)
            marks.append(self.mark())
            return found

        return noted

    def spans(self) -> list[StageTime]:
        """Return the spans of the step, which the device has done."""

        def at(mark: Any) -> float:
            if self._device.type == "cpu":
                return float(mark - self._begin)
            return float(self._begin.elapsed_time(mark)) / 1e3

        found: list[StageTime] = []
        before = free = 0.0  # when backward has made the last bucket ready, and its stages are done
        for number, marks in enumerate(self._buckets):
            ready, *places = map(at, marks)
            found.append(StageTime("compute", number, before, ready))
            names = BY_EXCHANGES[(len(places) - 1) // 2]
            begins = [max(ready, free), *places[:-1]]
            for name, begin, end in zip(names, begins, places, strict=True):
                found.append(StageTime(name, number, begin, end))
            before, free = ready, places[-1]
        return [*found, StageTime("optimizer", -1, max(before, free), at(self._end))]


def joined(spans: Sequence[StageTime]) -> list[StageTime]:
    """Return spans in which those of a stage of a bucket are one, from its begin to its end."""
    found: dict[tuple[str, int], StageTime] = {}
    for span in spans:
        key = span.stage, span.bucket
        first = found.get(key, span)
        found[key] = StageTime(*key, min(first.begin, span.begin), max(first.end, span.end))
    return list(found.values())
