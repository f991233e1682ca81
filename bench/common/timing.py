"""How calls are timed here: peers in turns, each after calls that do not count.

Other load on the machine then affects all peers alike. What is reported is a quantile of a call's
samples, and between ranks the samples are those of the slowest one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")


def in_turns(
    calls: Mapping[Name, Callable[[], object]],
    count: int,
    *,
    settle: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[Name], object] = lambda _: None,
    after: Callable[[Name], object] = lambda _: None,
) -> dict[Name, list[float]]:
    """Return the seconds of `count` calls of each peer, in the order in which they were made.

    Nothing collects garbage meanwhile.

    Args:
        calls: the peers, by name.
        count: timed calls of each.
        settle: calls before each that do not count: they bring the ranks into step, and the peer's
            memory back into the caches.
        clock: in seconds.
        before, after: called with the name at the ends of each turn, untimed.
    """
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    gc.disable()
    try:
        for _ in range(count):
            for name, call in calls.items():
                before(name)
                for _ in range(settle):
                    call()
                begin = clock()
                call()
                samples[name].append(clock() - begin)
                after(name)
    finally:
        gc.enable()
    return samples


def calls_within(seconds: float, slowest: float, fewest: int, most: int) -> int:
    """Return how many calls take the slowest peer so long, between a least and a largest number.

    Args:
        seconds: of all its calls.
        slowest: seconds of one of them.
        fewest, most: the bounds.
    """
    return max(fewest, min(most, int(seconds / max(slowest, 1e-9))))
