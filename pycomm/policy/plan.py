"""The decisions of one training: which codec each parameter's gradient travels with now, and why.

A hook owns a plan. It enters each parameter once, asks at the start of every step what has changed,
encodes with what `decisions` says until the next step, and lets the plan look at each bucket before
and after it is reduced. Codecs change for four reasons: the schedule, measurements (`steering`),
and the quality guard, which moves a parameter to a finer codec when its samples are bad.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pycomm import monitor
from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.policy.agreement import agree, agree_on_options, summary
from pycomm.policy.auto import TRYING
from pycomm.policy.checks import Checks
from pycomm.policy.exchange import find_link, gather, tell
from pycomm.policy.quality import finer, nominal_error
from pycomm.policy.rules import Decision, Moment, Parameter, Policy
from pycomm.policy.samples import Owed, Piece, Probe, Quality
from pycomm.policy.steering import steering


class Plan:
    """What a policy decides for the parameters of one model, equal on all ranks of a group.

    Collective: all ranks make one.

    Args:
        policy: equal on all ranks.
        group: the ranks that reduce together.
        options: what else must be equal on all ranks, a line for each.
        clock: seconds since some moment.

    Raises:
        WireMismatch: ranks have different policies or options; on all of them alike.
    """

    def __init__(
        self,
        policy: Policy,
        group: dist.ProcessGroup,
        *,
        options: Sequence[str] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.terms = (*policy.terms(), *options)
        """What all ranks were given alike, a line for each."""
        # Before anything else: with other rules, ranks would call other collectives.
        agree_on_options(self.terms, group)
        self.policy = policy
        self.group = group
        self.decisions: dict[str, Decision] = {}
        """By parameter name. A change replaces the decision, between two steps only."""
        self.step = 0
        self.overflows = 0
        """Steps whose result was not finite."""
        self.qualities: dict[str, Quality] = {}
        """What the last check of each parameter has found."""
        self.events: deque[str] = deque(maxlen=100)
        """What has changed in the course of training, and why; the last hundred."""
        self._clock = clock
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=15)
        asks = any(rule.link is not None for rule in policy.rules)
        self._moment = Moment(link=find_link(group) if asks else "inter")
        self._stage = policy.stage(self._moment)
        self._steering = steering(policy)
        self._checks = Checks(policy.guard, group, clock) if policy.guard else None
        self._escalated: dict[str, tuple[Codec, str]] = {}
        self._agreed: set[str] = set()
        self._since: dict[str, int] = {}  # first step of a parameter's codec
        self._told: dict[str, Codec] = {}  # people know this of each parameter
        monitor.watch(self)

    # ------------------------------------------------------------------ for the hook

    def add(self, parameter: Parameter) -> Decision:
        """Enter a parameter and return its decision. All ranks enter the same, in one order."""
        if self._steering and self.policy.rule(parameter, self._moment.link) is None:
            self._steering.enter(parameter)
        decision = self.decisions[parameter.name] = self._decide(parameter)
        return decision

    def agree(self, device: torch.device) -> None:
        """Check that all ranks have decided alike, and tell the decisions once; collective.

        Does nothing where every decision is checked already. See `pycomm.policy.agree`.

        Args:
            device: one that the group moves tensors of.

        Raises:
            WireMismatch: on all ranks alike; names the ranks and the first difference.
        """
        new = [decision for name, decision in self.decisions.items() if name not in self._agreed]
        if new and self.group.size() > 1:
            agree(new, self.group, device)
            if self.group.rank() == 0:
                for line in summary(new).splitlines():
                    tell(f"policy: {line}")
        self._agreed.update(self.decisions)
        self._told.update({name: d.codec for name, d in self.decisions.items()})

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
        now = self._clock()
        seconds = None if self._began is None else now - self._began
        self._began = now
        self.step = step
        self.overflows += not finite
        if seconds is not None:
            self._seconds.append(seconds)
        if self.group.size() == 1:
            return set()
        changes = self._judge(device, finite)
        warm, _ = self.policy.stage(self._moment)
        if self._steering and seconds is not None and not warm:
            changes |= self._steering.step(
                seconds, lambda numbers: gather(numbers, self.group, device), self._payload
            )
        self._moment = Moment(step, self._moment.epoch, self._moment.link)
        stage = self.policy.stage(self._moment)
        changes |= stage != self._stage
        self._stage = stage
        changed = self._change(device) if changes else set()
        if self._checks:
            self._checks.begin(step, list(self.decisions.values()))
        return changed

    def probe(
        self,
        values: torch.Tensor,
        pieces: Sequence[Piece],
        owed: Owed,
        *,
        rows: int = 1,
        average: bool = True,
    ) -> Probe | None:
        """Look at a bucket before it is reduced; all ranks call it for each bucket.

        Args:
            values: the bucket's gradients, any float dtype.
            pieces: what lies where, in a row.
            owed: what this rank's residuals add to the average.
            rows: of a reduce-scatter, one for each rank; 1 for an all-reduce.
            average: whether the result is the average; else it is the sum.

        Returns:
            None, or whose ``finish`` takes the result when it is there, before the next step.
        """
        if self.group.size() == 1:
            return None
        if self._steering:
            self._steering.probe(values.view(rows, -1)[0], pieces)
        if self._checks is None:
            return None
        return self._checks.probe(values, pieces, owed, rows=rows, average=average)

    # ------------------------------------------------------------------ for users

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the epoch, from 0, for schedules by epoch; on all ranks alike."""
        self._moment = Moment(self._moment.step, epoch, self._moment.link)

    def summary(self) -> str:
        """Return the decisions, a line for each codec and reason, and what has changed."""
        return "\n".join([summary(self.decisions.values()), *self.events])

    @property
    def step_seconds(self) -> float | None:
        """Median time of the last steps on this rank, from one reduction to the next."""
        return median(self._seconds) if self._seconds else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; the same on all ranks, of any number of ranks."""
        escalated = {n: (codec.spec(), reason) for n, (codec, reason) in self._escalated.items()}
        return {
            "epoch": self._moment.epoch,
            "escalated": escalated,
            "measured": self._steering.state_dict() if self._steering else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the next `advance`."""
        self.set_epoch(state["epoch"])
        self._escalated = {
            name: (parse_codec(spec), reason) for name, (spec, reason) in state["escalated"].items()
        }
        if self._steering and state["measured"]:
            self._steering.load_state_dict(state["measured"])
        self._stage = (False, -1)  # so that the next step decides anew

    def report(self) -> monitor.Report:
        """Return what `pycomm.monitor` shows; without collectives, and from any thread."""
        groups: dict[tuple[str, str], list[Decision]] = {}
        decisions = list(self.decisions.values())
        for decision in decisions:
            groups.setdefault((decision.codec.spec(), decision.reason), []).append(decision)
        found = list(self.qualities.values())
        return monitor.Report(
            step=self.step,
            step_seconds=self.step_seconds,
            payload_bytes=sum(d.encoded_bytes for d in decisions),
            plain_bytes=sum(4 * d.parameter.numel for d in decisions),
            overflows=self.overflows,
            checked=len(found),
            error=max((q.error for q in found), default=None),
            cosine=min((q.cosine for q in found), default=None),
            coding=max((q.coding for q in found), default=None),
            residual=max((q.residual for q in found), default=None),
            sampled=sum(q.sampled for q in found),
            saturated=sum(q.saturated for q in found),
            check_every=self._checks.every if self._checks else None,
            groups=tuple(
                monitor.Group(
                    codec=spec,
                    reason=reason,
                    parameters=len(members),
                    values=sum(d.parameter.numel for d in members),
                    payload_bytes=sum(d.encoded_bytes for d in members),
                )
                for (spec, reason), members in groups.items()
            ),
            events=tuple(self.events),
        )

    # ------------------------------------------------------------------ decisions

    def _decide(self, parameter: Parameter) -> Decision:
        if self._steering:
            codec, reason = self._steering.codec(parameter.name)
            decision = self.policy.decide(parameter, self._moment, codec)
            if not decision.reason:
                decision = Decision(parameter, codec, reason)
        else:
            decision = self.policy.decide(parameter, self._moment)
        if parameter.name in self._escalated:
            codec, reason = self._escalated[parameter.name]
            if nominal_error(codec) < nominal_error(decision.codec):
                return Decision(parameter, codec, reason)
        return decision

    def _judge(self, device: torch.device, finite: bool) -> bool:
        """Take in the check of the last step; return whether a codec changes."""
        if self._checks is None:
            return False
        found = self._checks.end(self.step - 1, self.step_seconds or 0.0, device)
        if not found or not finite:
            return False
        # A codec's first step also pays the debts of the codec before it.
        found = {n: q for n, q in found.items() if self._since.get(n) != q.step}
        self.qualities.update(found)
        changes = self._steering.checked(found) if self._steering else False
        for name, quality in found.items():
            codec = self.decisions[name].codec
            what = self._checks.complaint(name, codec, quality)
            better = finer(codec) if what and self._checks.guard.escalate else None
            if better is not None:
                reason = f"guard: {codec.spec()} was off by {quality.coding:.2f}"
                self._escalated[name] = (better, reason)
                changes = True
            elif what:
                self.events.append(f"step {quality.step}: {what}")
        return changes

    def _change(self, device: torch.device) -> set[str]:
        """Decide anew; return the names whose codec is another one now."""
        fresh = {name: self._decide(d.parameter) for name, d in self.decisions.items()}
        new = [d for name, d in fresh.items() if str(d) != str(self.decisions[name])]
        changed = {n for n, d in fresh.items() if d.codec != self.decisions[n].codec}
        self.decisions.update(fresh)
        self._since.update(dict.fromkeys(changed, self.step))
        if not new:
            return changed
        agree(new, self.group, device)
        self._agreed.update(d.parameter.name for d in new)
        settled = [d for d in new if d.reason != TRYING]
        news = [d for d in settled if self._told.get(d.parameter.name) != d.codec]
        self._told.update({d.parameter.name: d.codec for d in settled})
        for line in summary(news).splitlines():
            self.events.append(f"step {self.step}: {line}")
            if self.group.rank() == 0:
                tell(f"policy, step {self.step}: {line}")
        return changed

    def _payload(self, codec: Codec) -> int:
        """Bytes of a step's payloads if all that no rule decides had this codec."""
        parameters = (d.parameter for d in self.decisions.values())
        return sum(self.policy.decide(p, self._moment, codec).encoded_bytes for p in parameters)
