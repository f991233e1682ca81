"""A virtual clock: what happens when, on lanes that do one thing after the other.

It drives `python -m pycomm.plan --simulate`, slow ranks and nodes, and the stand-in for a GPU of
`python -m pycomm.bench step --stand-in`. Nothing sleeps: times are numbers, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pycomm.plan.algorithms import NOTHING, Size, all_reduce
from pycomm.plan.cluster import Cluster
from pycomm.plan.codecs import NONE, Coding
from pycomm.plan.model import Model
from pycomm.plan.prediction import Prediction, with_feedback
from pycomm.plan.prediction import step as by_formula


@dataclass
class Lane:
    """A thread, a stream of a device, or one direction of a link."""

    free: float = 0.0
    """When it has done all that it was given."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each of its tasks that takes time."""

    def take(self, seconds: float, *after: float) -> float:
        """Add a task, which begins when the lane is free and all else has happened; return its end.

        Args:
            seconds: of the task.
            after: times before which it cannot begin.
        """
        begin = max((self.free, *after))
        self.free = begin + seconds
        if seconds > 0:
            self.spans.append((begin, self.free))
        return self.free

    def busy(self, since: float, until: float) -> float:
        """Return the seconds between two times in which it did something."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.spans)


def step(
    model: Model,
    cluster: Cluster,
    coding: Coding = NONE,
    algorithm: str = "two_shot",
    *,
    slow_ranks: Mapping[int, float] | None = None,
    slow_nodes: Mapping[int, float] | None = None,
) -> Prediction:
    """Predict a step by events, of ranks that differ.

    An all-reduce begins when its bucket is ready on every rank and the one before has ended; it
    takes as long as the formulas say, over the slowest link.

    Args:
        model: what is trained.
        cluster: cluster on which it is trained.
        coding: the codec.
        algorithm: algorithm of every all-reduce.
        slow_ranks: factors by which some ranks compute more slowly.
        slow_nodes: factors by which the links of some nodes are slower.

    Raises:
        KeyError: the codec has no such algorithm.
    """
    slower = max((slow_nodes or {}).values(), default=1.0)
    inter = cluster.inter
    inter = replace(inter, rate=inter.rate / slower, receive=inter.receive / slower)
    cluster = replace(cluster, inter=inter)
    fed = with_feedback(cluster, coding)
    crowded = cluster.slowdown if cluster.compute_on_cores else 1.0
    paces = [model.compute * (slow_ranks or {}).get(r, 1.0) for r in range(cluster.ranks)]
    ranks, network, total = [Lane() for _ in paces], Lane(), NOTHING

    def compute(share: float, after: float = 0.0) -> float:
        """Return when the last rank has done a share of its computing."""
        pairs = zip(ranks, paces, strict=True)
        return max(lane.take(crowded * pace * share, after) for lane, pace in pairs)

    compute(model.forward)
    for bucket in model.buckets:
        size = Size.of(bucket.values, coding, bucket.exact, model.value_bytes)
        cost = all_reduce(fed, coding, algorithm, size)
        ready = compute(model.backward * bucket.values / model.values)
        network.take(cost.seconds, ready)
        total = total.plus(cost)
    end = compute(1 - model.forward - model.backward, network.free)
    if cluster.compute_on_cores:  # ranks and their communication share the cores
        end = max(end, (max(paces) + total.processor) / cluster.cores)
    return replace(by_formula(model, cluster, coding, algorithm), step=end)
