"""Planner: predicts a training step over hypothetical links, with and without each codec.

    python -m pycomm.plan 350M --ranks 16 --link 10gbe --compute 300ms

It runs without torch and without the native build; only `plan probe` needs the latter.
docs/planning.md states the assumptions.

Example:
    >>> from pycomm import plan
    >>> cluster = plan.Cluster(ranks=8, inter=plan.Link.of("1gbit"))
    >>> model = plan.of_count(25_000_000, compute=0.12)
    >>> plan.advise(model, cluster, plan.predict(model, cluster)).compress
    True
"""

from __future__ import annotations

from pycomm.plan.advice import Advice, advise
from pycomm.plan.cluster import LINKS, PROCESSORS, Cluster, CodecRates, Link, Processor
from pycomm.plan.codecs import CODINGS, Coding
from pycomm.plan.model import Model, ModelBucket, of_count, of_tensors
from pycomm.plan.prediction import Prediction, best_of_each, predict, step
from pycomm.plan.probe.result import ClusterProbe

__all__ = [
    "CODINGS",
    "LINKS",
    "PROCESSORS",
    "Advice",
    "Cluster",
    "ClusterProbe",
    "CodecRates",
    "Coding",
    "Link",
    "Model",
    "ModelBucket",
    "Prediction",
    "Processor",
    "advise",
    "best_of_each",
    "of_count",
    "of_tensors",
    "predict",
    "step",
]
