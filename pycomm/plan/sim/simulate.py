"""Event simulation of the formulas' predictions: messages queue, segments overlap, ranks differ.

Formulas hold for equal ranks and where either links or processors are the limit. Events also show
the cost of stragglers, and how much of a codec its own messages hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pycomm.plan.algorithms import Size
from pycomm.plan.cluster import Cluster
from pycomm.plan.codecs import NONE, Coding
from pycomm.plan.model import Model
from pycomm.plan.prediction import Prediction, with_feedback
from pycomm.plan.prediction import step as by_formula
from pycomm.plan.sim.engine import SimTask
from pycomm.plan.sim.network import Network
from pycomm.plan.sim.schedules import Schedule


def all_reduce(
    cluster: Cluster,
    coding: Coding,
    algorithm: str,
    size: Size,
    *,
    slow_nodes: Mapping[int, float] | None = None,
) -> float:
    """Return the seconds until the last rank has the result of one all-reduce.

    Args:
        cluster: the cluster.
        coding: the codec.
        algorithm: one of :func:`pycomm.plan.algorithms.algorithms`.
        size: size of the buffer.
        slow_nodes: factors by which the links of some nodes are slower.
    """
    net = Network(cluster, slow_nodes)
    start = [net.join([]) for _ in range(cluster.ranks)]
    Schedule(net, coding).all_reduce(algorithm, size, start)
    return net.engine.run()


def step(
    model: Model,
    cluster: Cluster,
    coding: Coding = NONE,
    algorithm: str = "two_shot",
    *,
    slow_ranks: Mapping[int, float] | None = None,
    slow_nodes: Mapping[int, float] | None = None,
) -> Prediction:
    """Predict a step by events.

    Args:
        model: what is trained.
        cluster: cluster on which it is trained.
        coding: the codec.
        algorithm: algorithm of every all-reduce.
        slow_ranks: factors by which some ranks compute more slowly.
        slow_nodes: factors by which the links of some nodes are slower.
    """
    net = Network(with_feedback(cluster, coding), slow_nodes)
    schedule, ranks = Schedule(net, coding), range(cluster.ranks)
    paces = [(slow_ranks or {}).get(rank, 1.0) * model.compute for rank in ranks]

    def compute(rank: int, share: float, after: list[SimTask]) -> SimTask:
        return net.engine.task(net.computing[rank], paces[rank] * share, after)

    computed = [compute(rank, model.forward, []) for rank in ranks]
    done = list(computed)
    for bucket in model.buckets:
        share = model.backward * bucket.values / model.values
        computed = [compute(rank, share, [computed[rank]]) for rank in ranks]
        start = [net.join([computed[rank], done[rank]]) for rank in ranks]
        size = Size.of(bucket.values, coding, bucket.exact, model.value_bytes)
        done = schedule.all_reduce(algorithm, size, start)
    for rank in ranks:
        compute(rank, 1 - model.forward - model.backward, [computed[rank], done[rank]])
    formula = by_formula(model, cluster, coding, algorithm)
    return replace(formula, step=net.engine.run(), wire_bytes=max(net.sent))
