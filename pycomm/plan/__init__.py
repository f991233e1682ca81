"""Planner: predicts a training step over hypothetical links, with and without each codec.

    python -m pycomm.plan 350M --ranks 16 --link 10gbe --compute 300ms

It runs without torch and without the native build; only `plan probe` needs the latter.
docs/planning.md states the assumptions.

Example:
    >>> from pycomm import plan
    >>> cluster = plan.Cluster(ranks=8, inter=plan.Link.of("1gbit"))
    >>> model = plan.of_count(25_000_000, compute=0.12)
    >>> plan.advise(cluster, plan.predict(model, cluster)).compress
    True
"""

from __future__ import annotations

from pycomm.plan.advice import Advice as Advice
from pycomm.plan.advice import advise as advise
from pycomm.plan.cluster import LINKS as LINKS
from pycomm.plan.cluster import PROCESSORS as PROCESSORS
from pycomm.plan.cluster import Cluster as Cluster
from pycomm.plan.cluster import CodecRates as CodecRates
from pycomm.plan.cluster import Link as Link
from pycomm.plan.cluster import Processor as Processor
from pycomm.plan.codecs import CODINGS as CODINGS
from pycomm.plan.codecs import Coding as Coding
from pycomm.plan.model import Model as Model
from pycomm.plan.model import ModelBucket as ModelBucket
from pycomm.plan.model import of_count as of_count
from pycomm.plan.model import of_tensors as of_tensors
from pycomm.plan.prediction import Prediction as Prediction
from pycomm.plan.prediction import best_of_each as best_of_each
from pycomm.plan.prediction import predict as predict
from pycomm.plan.prediction import step as step
from pycomm.plan.probe.result import ClusterProbe as ClusterProbe
