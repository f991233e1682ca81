"""Which codec each parameter's gradient travels with, and why.

`Policy`, `Rule` and `Guard` are what a user says, as data. A `Plan` is what becomes of them in one
training: the decision for each parameter, which may change between steps, on all ranks alike.
"""

from __future__ import annotations

from pycomm.policy.agreement import agree, agree_on_options, summary
from pycomm.policy.auto import Trial
from pycomm.policy.guard import Guard
from pycomm.policy.plan import Plan
from pycomm.policy.rules import AUTO, EXACT, PROTECT, Decision, Moment, Parameter, Policy, Rule
from pycomm.policy.text import usual_feedback

__all__ = [
    "AUTO",
    "EXACT",
    "PROTECT",
    "Decision",
    "Guard",
    "Moment",
    "Parameter",
    "Plan",
    "Policy",
    "Rule",
    "Trial",
    "agree",
    "agree_on_options",
    "summary",
    "usual_feedback",
]
