"""What a user says about codecs: a default, rules, and when they change, as data.

A policy decides from what is equal on all ranks: names, shapes, dtypes, the number of the step and
of the epoch, and how the ranks reach each other. What it leaves open ("auto", a budget, a bound) is
measured by a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

from pycomm.codecs import Cast, Codec
from pycomm.codecs import codec as parse_codec
from pycomm.policy.auto import Trial
from pycomm.policy.guard import Guard
from pycomm.policy.text import options

EXACT = "fp32"
AUTO = "auto"
Link = Literal["intra", "inter"]
Schedule = tuple[tuple[int, str | Codec], ...]

# Lin et al. 2018, "Deep Gradient Compression", section 3.3: what is sent in the first epochs.
DGC_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True)
class Parameter:
    """What a rule may look at."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of values."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Moment:
    """What decisions depend on besides the parameter; equal on all ranks."""

    step: int = 1
    epoch: int = 0
    link: Link = "inter"
    """Whether all ranks share a node ("intra"), or some are reached over a network ("inter")."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The codec of the parameters for which all conditions hold.

    Example:
        >>> from pycomm.policy import Rule
        >>> Rule(codec="int8", name="*.embedding.*", reason="sensitive")  # doctest: +ELLIPSIS
        Rule(codec='int8', name='*.embedding.*', ...)
    """

    codec: str | Codec
    name: str = "*"
    """Pattern of names, as file names are matched: ``*.bias``."""
    min_numel: int = 0
    max_numel: int | None = None
    max_dims: int | None = None
    dtype: torch.dtype | None = None
    link: Link | None = None
    """How the ranks of the group reach each other; see `Moment`."""
    reason: str = ""
    """Goes into the log."""

    def matches(self, parameter: Parameter, link: Link = "inter") -> bool:
        """Whether all conditions hold."""
        return (
            fnmatchcase(parameter.name, self.name)
            and parameter.numel >= self.min_numel
            and (self.max_numel is None or parameter.numel <= self.max_numel)
            and (self.max_dims is None or len(parameter.shape) <= self.max_dims)
            and (self.dtype is None or parameter.dtype == self.dtype)
            and (self.link is None or self.link == link)
        )


# Norms and biases are a thousandth of the bytes, and compressing them has wrecked models.
PROTECT = (
    Rule(codec=EXACT, max_dims=1, reason="norms and biases stay exact"),
    Rule(codec=EXACT, max_numel=2047, reason="too small to be worth it"),
)


@dataclass(frozen=True)
class Decision:
    """The codec of one parameter."""

    parameter: Parameter
    codec: Codec
    reason: str

    @property
    def exact(self) -> bool:
        """Whether values arrive as they were, so that there is nothing to feed back."""
        return self.codec == Cast("float32")

    @property
    def encoded_bytes(self) -> int:
        """Size of the parameter's payload."""
        return self.codec.encoded_bytes(self.parameter.numel)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.parameter.shape)) or "scalar"
        return f"{self.parameter.name} ({shape}): {self.codec.spec()}, {self.reason}"


@dataclass(frozen=True)
class Policy:
    """A codec for everything, and rules for what needs another. The first rule that matches wins.

    Raises:
        ValueError: a codec that does not exist, or options that exclude each other.

    Example:
        >>> from pycomm.policy import PROTECT, Parameter, Policy, Rule
        >>> import torch
        >>> policy = Policy("int4", (Rule(codec="int8", name="head.*"), *PROTECT))
        >>> weight = Parameter("head.weight", (64, 64), torch.float32)
        >>> policy.decide(weight).codec.spec()
        'quant:bits=8,block=256,rounding=nearest'
        >>> Policy.of("fp32 100:int8").schedule
        ((100, 'int8'),)
    """

    codec: str | Codec = "int8"
    """What no rule matches. "auto": the fastest that is accurate enough, by measured step time."""
    rules: tuple[Rule, ...] = PROTECT
    warmup: int | Literal["dgc"] = 0
    """Steps at the beginning in which everything is exact. "dgc", for sparse codecs: the densities
    25, 6.25, 1.5625 and 0.4 % in the first epochs, then the codec's own."""
    schedule: Schedule = ()
    """Codecs that follow ``codec``, each with the number of its first step, from 1."""
    epochs: Schedule = ()
    """The same by epochs, from 0; see `Plan.set_epoch`."""
    budget: float | None = None
    """Bits per value of what no rule matches, spent where measured energy makes them worth most."""
    error: float | None = None
    """The most that an averaged gradient may be off, relative to its L2 norm, by samples. Alone:
    bits move up and down to hold it. With "auto": choices that are worse are left out."""
    candidates: tuple[str | Codec, ...] = ()
    """Codecs that "auto", ``budget`` and ``error`` choose from; () for those that suit."""
    guard: Guard | None = field(default_factory=Guard)
    """Compares samples of what was reduced with the truth; None: does not."""
    trial: Trial = field(default_factory=Trial)
    """How "auto" tries codecs."""

    def __post_init__(self) -> None:
        listed = [spec for _, spec in (*self.schedule, *self.epochs)]
        listed += [*self.candidates, *(rule.codec for rule in self.rules)]
        for spec in listed if self.codec == AUTO else (self.codec, *listed):
            parse_codec(spec)
        if self.schedule and self.epochs:
            raise ValueError("policy: give a schedule by steps or by epochs, not both")
        ways = {
            "a schedule": bool(self.schedule or self.epochs or self.warmup == "dgc"),
            "budget": self.budget is not None,
            "auto": self.codec == AUTO,
        }
        if self.codec != AUTO:
            ways["error"] = self.error is not None
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1:
            raise ValueError(f"policy: {' and '.join(chosen)} both choose codecs; use one of them")
        for name in ("budget", "error"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"policy: {name}={value} must be above 0")
        if self.error is not None and self.guard is None:
            raise ValueError("policy: error= is held by the guard's samples; leave the guard on")
        if self.warmup != "dgc" and self.warmup < 0:
            raise ValueError(f"policy: warmup={self.warmup}: give a number of steps")

    @classmethod
    def of(cls, spec: str | Codec | Policy) -> Policy:
        """Return the policy that a text or codec stands for; a policy is returned as it is.

        A text is a codec or "auto", then words that are parted by spaces: ``warmup=100``,
        ``warmup=dgc``, ``budget=4.5``, ``error=0.1``, ``guard=off``, ``100:int8`` (int8 from step
        100 on), ``epoch2:topk:0.01`` (from epoch 2 on). "budget=4.5" and "error=0.1" need no codec.

        Raises:
            ValueError: a word that is none of these; an unknown codec.
        """
        if isinstance(spec, Policy):
            return spec
        if isinstance(spec, Codec):
            return cls(spec)
        return cls(**options(spec))

    def terms(self) -> list[str]:
        """Return what it says, a line for each field; equal for policies that decide alike."""

        def parsed(schedule: Schedule) -> Schedule:
            return tuple((begin, parse_codec(spec)) for begin, spec in schedule)

        same = replace(
            self,
            codec=AUTO if self.codec == AUTO else parse_codec(self.codec),
            rules=tuple(replace(rule, codec=parse_codec(rule.codec)) for rule in self.rules),
            schedule=parsed(self.schedule),
            epochs=parsed(self.epochs),
            candidates=tuple(map(parse_codec, self.candidates)),
        )
        return [f"{f.name}={getattr(same, f.name)!r}" for f in fields(same)]

    @property
    def steered(self) -> bool:
        """Whether measurements choose the codecs that no rule chooses."""
        return self.codec == AUTO or self.budget is not None or self.error is not None

    def stage(self, moment: Moment) -> tuple[bool, int]:
        """Return whether the moment is in the warm-up, and how many changes have come by then.

        As long as the stage and the link stay, decisions stay.
        """
        warm = self.warmup != "dgc" and moment.step <= self.warmup
        at = moment.step if self.schedule else moment.epoch
        return warm, sum(begin <= at for begin, _ in self.schedule or self._epochs)

    def rule(self, parameter: Parameter, link: Link = "inter") -> Rule | None:
        """Return the rule that decides for a parameter, if there is one."""
        return next((rule for rule in self.rules if rule.matches(parameter, link)), None)

    def decide(
        self, parameter: Parameter, moment: Moment = Moment(), default: Codec | None = None
    ) -> Decision:
        """Return the codec of one parameter and the reason.

        Args:
            parameter: whose codec.
            moment: now.
            default: what no rule matches, if that was measured; its reason is left empty.
        """
        warm, turns = self.stage(moment)
        if warm:
            return Decision(parameter, parse_codec(EXACT), f"warm-up of {self.warmup} steps")
        rule = self.rule(parameter, moment.link)
        if rule is not None:
            return _fitted(parameter, rule.codec, rule.reason or f"rule for {rule.name}")
        if default is not None:
            return _fitted(parameter, default, "")
        if turns:
            begin, spec = (self.schedule or self._epochs)[turns - 1]
            unit = "step" if self.schedule else "epoch"
            return _fitted(parameter, spec, f"from {unit} {begin}")
        spec = EXACT if self.codec == AUTO else self.codec
        return _fitted(parameter, spec, "default")

    @property
    def _epochs(self) -> Schedule:
        if self.warmup != "dgc" or self.codec == AUTO:
            return self.epochs
        last = parse_codec(self.codec)
        density = fields(last)[0].name
        own = getattr(last, density)
        if not isinstance(own, float):
            raise ValueError(f"policy: warmup=dgc is for codecs with a density, not {last.spec()}")
        steps = [replace(last, **{density: d}) for d in DGC_DENSITIES if d > own]
        return tuple(enumerate([*steps, last]))


def _fitted(parameter: Parameter, spec: str | Codec, reason: str) -> Decision:
    codec = parse_codec(spec)
    fitted = codec.fit(parameter.shape)
    if fitted.name != codec.name:
        reason = f"{codec.name} does not fit its shape"
    return Decision(parameter, fitted, reason)
