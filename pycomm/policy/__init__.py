"""Which codec each parameter's gradient travels with, and why.

`Policy` and `Rule` are what a user says, as data. A `Plan` is what becomes of them in one training:
the decision for each parameter, which may change between steps, on all ranks alike.
"""

from __future__ import annotations

from pycomm.policy.agreement import agree, summary
from pycomm.policy.plan import Plan
from pycomm.policy.rules import EXACT, PROTECT, Decision, Parameter, Policy, Rule

__all__ = [
    "EXACT",
    "PROTECT",
    "Decision",
    "Parameter",
    "Plan",
    "Policy",
    "Rule",
    "agree",
    "summary",
]
