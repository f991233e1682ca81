"""Formula of a training step: buckets are sent while backward runs, one after the other.

Bucket i is ready once backward has passed its parameters, and its all-reduce begins when that of
the bucket before has ended. The step ends with the last all-reduce and then the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pycomm.plan.algorithms import NOTHING, Size, algorithms, all_reduce
from pycomm.plan.cluster import Cluster
from pycomm.plan.codecs import CODINGS, NONE, Coding
from pycomm.plan.model import Model


@dataclass(frozen=True)
class Prediction:
    """A step with one codec and one algorithm. Seconds and bytes are those of one rank."""

    codec: str
    algorithm: str
    step: float
    compute: float
    """Seconds of the same step without any other rank."""
    communication: float
    """Seconds of all all-reduces, hidden or not."""
    latency: float
    """Part of it that no number of bytes changes: rounds that wait for each other."""
    wire_bytes: float
    """Bytes that a rank sends to other nodes, or to other ranks if there is one node."""
    error: float
    """Relative squared error of the averaged gradient, for independent normal gradients."""

    @property
    def exposed(self) -> float:
        """Seconds of the step in which nothing is computed."""
        return self.step - self.compute

    @property
    def efficiency(self) -> float:
        """A rank's throughput relative to one alone: 1 is perfect scaling."""
        return self.compute / self.step if self.step else 1.0


def step(
    model: Model,
    cluster: Cluster,
    coding: Coding = NONE,
    algorithm: str = "two_shot",
) -> Prediction:
    """Predict a step by formulas.

    Args:
        model: what is trained.
        cluster: cluster on which it is trained.
        coding: the codec of all tensors of two or more dimensions.
        algorithm: algorithm of every all-reduce.

    Raises:
        KeyError: the codec has no such algorithm.
    """
    fed = cluster
    if coding.feedback and not coding.exact:
        rates = coding.rates(cluster.processor)
        fed = replace(cluster, processor=cluster.processor.fed(coding.name, rates))
    # Computing is slower where ranks share cores.
    compute = model.compute * (cluster.slowdown if cluster.compute_on_cores else 1.0)
    total, end, passed = NOTHING, 0.0, 0
    for bucket, count in model.runs:
        size = Size.of(bucket.values, coding, bucket.exact, model.value_bytes)
        cost = all_reduce(fed, coding, algorithm, size)
        first, last = (
            compute * (model.forward + model.backward * (passed + k * bucket.values) / model.values)
            for k in (1, count)
        )
        # Of equal buckets, all later ones wait for the first or the last.
        end = max(max(end, first) + count * cost.seconds, last + cost.seconds)
        total, passed = total.plus(cost, count), passed + count * bucket.values
    optimizer = compute * (1 - model.forward - model.backward)
    end = max(end, compute - optimizer) + optimizer
    if cluster.compute_on_cores:
        end = max(end, (model.compute + total.processor) / cluster.cores)
    return Prediction(
        codec=coding.name,
        algorithm=algorithm,
        step=end,
        compute=model.compute,
        communication=total.seconds,
        latency=total.latency,
        wire_bytes=total.sent,
        error=coding.total_error if cluster.ranks > 1 else 0.0,
    )


def predict(
    model: Model,
    cluster: Cluster,
    codings: Iterable[Coding] = tuple(CODINGS.values()),
) -> list[Prediction]:
    """Predict a step for every codec and algorithm that `auto` may choose, the shortest first.

    Codecs that send no less than the gradients themselves (16 bits for bf16) are left out.
    """
    found = [
        step(model, cluster, coding, name)
        for coding in codings
        if coding.exact or coding.payload < model.value_bytes
        for name in algorithms(cluster, coding)
    ]
    return sorted(found, key=lambda p: (p.step, p.error))


def best_of_each(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest algorithm of each codec, the shortest step first."""
    best: dict[str, Prediction] = {}
    for prediction in predictions:
        best.setdefault(prediction.codec, prediction)
    return list(best.values())
