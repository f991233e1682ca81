"""Policies: the choice of a codec for each parameter's gradient.

`Policy`, `Rule` and `Guard` are the user's configuration, as data. A `Plan` applies them in one
training: it has the decision for each parameter, which may change between steps and is equal on all
ranks.
"""

from __future__ import annotations

from pycomm.policy.agreement import agree_on_options as agree_on_options
from pycomm.policy.agreement import refused_together as refused_together
from pycomm.policy.plan import Plan as Plan
from pycomm.policy.rules import AUTO as AUTO
from pycomm.policy.rules import CODED as CODED
from pycomm.policy.rules import EXACT as EXACT
from pycomm.policy.rules import PROTECT as PROTECT
from pycomm.policy.rules import Decision as Decision
from pycomm.policy.rules import Guard as Guard
from pycomm.policy.rules import Parameter as Parameter
from pycomm.policy.rules import Policy as Policy
from pycomm.policy.rules import Rule as Rule
