"""Plan: the current codec of each parameter's gradient in one training, and the reason.

A hook owns a plan. It enters each parameter once, asks at the start of every step which codecs have
changed, encodes by `decisions` until the next step, and shows the plan each bucket before and after
it is reduced. Codecs change by the schedule, by measured times (`auto`), and by the
quality guard, which moves a parameter to a finer codec when its samples are bad.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pycomm import monitor
from pycomm.codecs import Codec, short_text
from pycomm.codecs import codec as parse_codec
from pycomm.log import logger, tell
from pycomm.policy.agreement import agree, agree_on_options, grouped, summary
from pycomm.policy.auto import TRYING, Auto, accurate_enough
from pycomm.policy.checks import BucketProbe, Checks, Quality, ResidualOf
from pycomm.policy.exchange import gather_in_mesh
from pycomm.policy.names import few
from pycomm.policy.quality import bits, finer, nominal_error
from pycomm.policy.rules import AUTO, EXACT, Decision, Parameter, Policy


class Plan:
    """The decisions of a policy for the parameters of one model, equal on all ranks of a group.

    Collective: all ranks make one.

    Args:
        policy: the policy, equal on all ranks.
        groups: the ranks that reduce together; of a mesh, whose ranks decide together, the groups
            along its dimensions, of which the last one reduces.
        options: other options that must be equal on all ranks, a line for each.
        clock: function that returns seconds since some moment.

    Raises:
        WireMismatch: ranks have different policies or options; raised on all ranks.
    """

    def __init__(
        self,
        policy: Policy,
        *groups: dist.ProcessGroup,
        options: Sequence[str] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.groups, self.group = groups, groups[-1]
        self._options, self._clock = options, clock
        self.step = 0
        self.decisions: dict[str, Decision] = {}
        """Decisions by parameter name. A change replaces the decision, only between two steps."""
        self.overflows = 0
        """Steps whose result was not finite."""
        self.events: deque[str] = deque(maxlen=100)
        """The last hundred changes in the course of training, with the reasons."""
        self._take(policy)
        monitor.watch(self)

    def _take(self, policy: Policy) -> None:
        """Take a policy that no parameter has a decision of yet; or raise, and change nothing."""
        terms = (*policy.terms(), *self._options)
        # This check comes first, since ranks with other rules would call other collectives.
        agree_on_options(terms, *self.groups)
        self.policy = policy
        self.exactly: dict[str, str] = {}
        """Parameters that currently travel exactly in spite of their decision, with the reason."""
        self.sampled: Mapping[str, slice] = {}
        """What is to be sampled in this step: as long as it is empty, `probe` does nothing."""
        self.qualities: dict[str, Quality] = {}
        """Result of each parameter's last check."""
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=15)
        self._for_step = self.step + 1  # number of the step
        self._stage = policy.stage(self._for_step)
        self._auto: Auto | None = None
        if policy.codec == AUTO:
            found = {short_text(c): c for c in accurate_enough(policy)}
            self._candidates = found  # by the texts that `auto` knows
            self._auto = Auto({text: bits(codec) for text, codec in found.items()})
        self._checks = Checks(policy.guard, self.groups, self._clock) if policy.guard else None
        self._escalated: dict[str, tuple[Codec, str]] = {}
        self._agreed: set[str] = set()
        self._since: dict[str, int] = {}  # first step of a parameter's codec
        self._told: dict[str, Codec] = {}  # the codec that was last logged for each parameter

    # ------------------------------------------------------------------ for the hook

    def add(self, parameter: Parameter) -> Decision:
        """Enter a parameter and return its decision; in the same order on all ranks."""
        decision = self.decisions[parameter.name] = self._decide(parameter, self._for_step)
        self._agreed.discard(parameter.name)  # the old one of this name may have had another shape
        return decision

    def _warn_of_rules(self) -> None:
        """Warn about rules that match no parameter, on the first rank."""
        if self.group.rank() > 0:
            return
        for rule in self.policy.rules:
            if not any(map(rule.names, self.decisions)):
                close = get_close_matches(rule.name.replace("*", ""), self.decisions, 3, 0.3)
                logger.warning(
                    "policy: the rule %s=%s matches no parameter; names are %s",
                    rule.name,
                    short_text(parse_codec(rule.codec)),
                    few([*close, *(name for name in self.decisions if name not in close)]),
                )

    def agree(self, device: torch.device) -> None:
        """Check that all ranks have decided alike, and log the decisions once; collective.

        The first call follows when all parameters were entered, and warns about rules that match
        none. Decisions that were checked before are not checked again. See `agreement.agree`.

        Args:
            device: a device whose tensors the group moves.

        Raises:
            WireMismatch: decisions differ; raised on all ranks, with the ranks and the first
                difference.
        """
        if not self._agreed:
            self._warn_of_rules()
        new = [decision for name, decision in self.decisions.items() if name not in self._agreed]
        if new and self.group.size() > 1:
            agree(new, self.group, device)
            if self.group.rank() == 0:
                for line in summary(new).splitlines():
                    tell(f"policy: {line}")
        self._agreed.update(self.decisions)
        self._told.update({name: d.codec for name, d in self.decisions.items()})

    def advance(self, step: int, device: torch.device, *, finite: bool = True) -> set[str]:
        """Begin a step: make the changes that are due; return the names whose codec has changed.

        Collective: all ranks call it at the start of each step that reduces, before its first
        bucket. A changed parameter keeps its residual: a parameter that has become exact is encoded
        with its residual once more, which an exact codec leaves at zero.

        Args:
            step: number of the step, from 1.
            device: a device whose tensors the group moves.
            finite: whether the result of the last step was finite.
        """
        now = self._clock()
        seconds = None if self._began is None else now - self._began
        self._began = now
        self.step = step
        if seconds is not None:
            self._seconds.append(seconds)
        if self.group.size() == 1:
            return set()
        changes = self._judge(device, finite)
        warm, _ = self.policy.stage(self._for_step)
        if self._auto and seconds is not None and not warm:
            exchange = partial(gather_in_mesh, groups=self.groups, device=device)
            changes |= self._auto.step(seconds, exchange)
        self._for_step = step
        stage = self.policy.stage(step)
        changes |= stage != self._stage
        self._stage = stage
        changed = self._change(device) if changes else set()
        if self._checks:
            self.sampled = self._checks.begin(step, list(self.decisions.values()))
        return changed

    @property
    def judges(self) -> bool:
        """Whether `advance` will judge the samples of the step before."""
        return self._checks is not None and self._checks.are_pending

    def probe(
        self,
        values: torch.Tensor,
        pieces: Sequence[Any],
        residual_of: ResidualOf,
        **layout: Any,
    ) -> BucketProbe | None:
        """Sample a bucket before it is reduced; see `Checks.probe`."""
        if self._checks is None:
            return None
        return self._checks.probe(values, pieces, residual_of, **layout)

    def follow(
        self,
        policy: Policy,
        device: torch.device,
        *,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on with another policy, or other ranks, for the same parameters; collective.

        Args:
            policy: the new policy, equal on all ranks. Its steps count from the start of
                training.
            device: a device whose tensors the group moves.
            saved: what `state_dict` returned, equal on all ranks: the group has other ranks than
                before.

        Raises:
            WireMismatch: ranks have different policies; raised on all ranks.
        """
        self._take(policy)
        if saved is None:
            self.events.append(f"step {self.step + 1}: another policy, {policy.codec}")
        else:
            self.events.append(f"step {self.step + 1}: {self.group.size()} ranks from now on")
            self.load_state_dict(saved)
        for decision in list(self.decisions.values()):
            self.add(decision.parameter)
        self._since = dict.fromkeys(self.decisions, self.step + 1)
        self.agree(device)

    # ------------------------------------------------------------------ for users

    def summary(self) -> str:
        """Return the decisions, a line for each codec and reason, and the changes."""
        return "\n".join([summary(self._shown()), *self.events])

    @property
    def step_seconds(self) -> float | None:
        """Median time of the last steps on this rank, from one reduction to the next."""
        return median(self._seconds) if self._seconds else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint; equal on all ranks, for any number of ranks."""
        escalated = {n: (codec.spec(), reason) for n, (codec, reason) in self._escalated.items()}
        return {
            "escalated": escalated,
            "measured": self._auto.state_dict() if self._auto else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; it takes effect with the next `advance`."""
        self._escalated = {
            name: (parse_codec(spec), reason) for name, (spec, reason) in state["escalated"].items()
        }
        if self._auto and state["measured"]:
            self._auto.load_state_dict(state["measured"])
        self._stage = (False, -1)  # so that the next step decides anew

    def report(self) -> monitor.MonitorReport:
        """Return the report for `pycomm.monitor`; without collectives, and from any thread."""
        decisions = self._shown()
        found = list(self.qualities.values())
        payload, plain = _bytes(decisions)
        return monitor.MonitorReport(
            step=self.step,
            step_seconds=self.step_seconds,
            payload_bytes=payload,
            plain_bytes=plain,
            overflows=self.overflows,
            checked=len(found),
            error=max((q.error for q in found), default=None),
            cosine=min((q.cosine for q in found), default=None),
            coding=max((q.coding for q in found), default=None),
            residual=max((q.residual for q in found), default=None),
            check_every=self._checks.every if self._checks else None,
            groups=tuple(
                monitor.Group(
                    codec=spec,
                    reason=reason,
                    parameters=len(members),
                    values=sum(d.parameter.numel for d in members),
                    payload_bytes=_bytes(members)[0],
                )
                for (spec, reason), members in grouped(decisions).items()
            ),
            events=tuple(self.events),
        )

    def _shown(self) -> list[Decision]:
        """Return the decisions that are in effect."""
        exact, why = parse_codec(EXACT), dict(self.exactly)  # copied: other threads may change it
        return [
            Decision(d.parameter, exact, why[name]) if name in why else d
            for name, d in list(self.decisions.items())
        ]

    # ------------------------------------------------------------------ decisions

    def codecs_of(self, step: int) -> dict[str, Codec]:
        """Return the codecs of a step, by name; after `load_state_dict` of the saved one."""
        return {n: self._decide(d.parameter, step).codec for n, d in self.decisions.items()}

    def _decide(self, parameter: Parameter, step: int) -> Decision:
        if self._auto:
            codec = self._candidates[self._auto.codec]
            decision = self.policy.decide(parameter, step, codec)
            if not decision.reason:
                decision = Decision(parameter, codec, self._auto.reason)
        else:
            decision = self.policy.decide(parameter, step)
        if parameter.name in self._escalated:
            codec, reason = self._escalated[parameter.name]
            if nominal_error(codec) < nominal_error(decision.codec):
                return Decision(parameter, codec, reason)
        return decision

    def _judge(self, device: torch.device, finite: bool) -> bool:
        """Evaluate the check of the last step; return whether a codec changes."""
        if self._checks is None:
            return False
        found = self._checks.end(self.step - 1, self.step_seconds or 0.0, device)
        if not found or not finite:
            return False
        # A codec's first step also sends the residual of the codec before it.
        found = {n: q for n, q in found.items() if self._since.get(n) != q.step}
        self.qualities.update(found)
        changes = False
        for name, quality in found.items():
            codec = self.decisions[name].codec
            what = self._checks.warning(name, codec, quality)
            better = finer(codec) if what and self._checks.guard.escalate else None
            if better is not None:
                reason = f"guard: {short_text(codec)} was off by {quality.coding:.2f}"
                self._escalated[name] = (better, reason)
                changes = True
            elif what:
                self.events.append(f"step {quality.step}: {what}")
        return changes

    def _change(self, device: torch.device) -> set[str]:
        """Decide anew; return the names whose codec has changed."""
        fresh = {n: self._decide(d.parameter, self._for_step) for n, d in self.decisions.items()}
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


def _bytes(decisions: Iterable[Decision]) -> tuple[int, int]:
    """Return the bytes of some parameters' gradients, encoded once and as they are."""
    coded = plain = 0
    for decision in decisions:
        coded += decision.encoded_bytes
        plain += decision.parameter.numel * decision.parameter.value_bytes
    return coded, plain
