"""Policies: the choice of a codec for each parameter's gradient.

`Policy`, `Rule` and `Guard` are the user's configuration, as data. A `Plan` applies them in one
training: it has the decision for each parameter, which may change between steps and is equal on all
ranks.
"""

from __future__ import annotations

from pycomm.policy.agreement import agree, agree_on_options, refused_together, summary
from pycomm.policy.auto import Trial
from pycomm.policy.guard import Guard
from pycomm.policy.plan import Plan
from pycomm.policy.rules import (
    AUTO,
    CODED,
    EXACT,
    PROTECT,
    Decision,
    Parameter,
    Policy,
    Rule,
)

__all__ = [
    "AUTO",
    "CODED",
    "EXACT",
    "PROTECT",
    "Decision",
    "Guard",
    "Parameter",
    "Plan",
    "Policy",
    "Rule",
    "Trial",
    "agree",
    "agree_on_options",
    "refused_together",
    "summary",
]
