"""Policies as data: a default codec, rules, schedules, and the options of the quality guard.

A policy decides from data that is equal on all ranks: names, shapes, dtypes, and the number of the
step. If it leaves a codec open ("auto"), a `Plan` measures.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

import torch

from pycomm.arguments import number, put, typed, whole
from pycomm.codecs import Cast, Codec, short_text
from pycomm.codecs import codec as parse_codec
from pycomm.policy.names import bare

EXACT = "fp32"
AUTO = "auto"
Schedule = tuple[tuple[int, str | Codec], ...]

_MARGIN = 1.5
"""Factor for the differences between blocks of a tensor: on heavy tails the error of 256 values is
seldom this much above that of all."""


@dataclass(frozen=True)
class Parameter:
    """The properties of a parameter that rules may use."""

    name: str
    shape: tuple[int, ...]
    """Shape of the numbers that travel: complex ones are reals with a last dimension of 2."""
    dtype: torch.dtype
    exact: str = ""
    """Reason to send it exactly whatever the policy says; "": none."""

    @property
    def numel(self) -> int:
        """Number of values."""
        return torch.Size(self.shape).numel()

    @property
    def value_bytes(self) -> int:
        """Size of a value as it is kept."""
        return self.dtype.itemsize // (2 if self.dtype.is_complex else 1)


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
    """Pattern of names, matched like file names: ``*.bias``. Components that `torch.compile` and
    other wrappers insert into names, and a leading "module.", are ignored."""
    min_numel: int = 0
    max_numel: int | None = None
    max_dims: int | None = None
    dtype: torch.dtype | None = None
    reason: str = ""
    """Reason that is logged."""

    def __post_init__(self) -> None:
        typed("rule: codec", self.codec, str, Codec)
        typed("rule: name", self.name, str)
        typed("rule: dtype", self.dtype, torch.dtype, None)
        put(self, min_numel=whole("rule: min_numel", self.min_numel))
        for bound in ("max_numel", "max_dims"):
            if getattr(self, bound) is not None:
                put(self, **{bound: whole(f"rule: {bound}", getattr(self, bound))})

    def matches(self, parameter: Parameter) -> bool:
        """Return whether all conditions hold."""
        return (
            self.names(parameter.name)
            and parameter.numel >= self.min_numel
            and (self.max_numel is None or parameter.numel <= self.max_numel)
            and (self.max_dims is None or len(parameter.shape) <= self.max_dims)
            and (self.dtype is None or parameter.dtype == self.dtype)
        )

    def names(self, name: str) -> bool:
        """Return whether the pattern matches a parameter's name."""
        return fnmatchcase(name, self.name) or fnmatchcase(bare(name), bare(self.name))


# Norms and biases are a thousandth of the bytes, and compressing them has damaged models.
PROTECT = (
    Rule(codec=EXACT, max_dims=1, reason="norms and biases stay exact"),
    Rule(codec=EXACT, max_numel=2047, reason="too small to be worth it"),
)

# Dtypes that codecs take. Complex numbers are not coded as pairs of reals: an error in one of the
# two turns the phase, and no check here looks at the pair.
CODED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Decision:
    """The codec of one parameter."""

    parameter: Parameter
    codec: Codec
    reason: str

    @property
    def exact(self) -> bool:
        """Return whether values travel exactly, so that there is no error to feed back."""
        return self.codec == Cast("float32")

    @property
    def uncoded(self) -> bool:
        """Whether values travel in their own dtype, which no codec takes: float64."""
        return self.exact and self.parameter.dtype not in (*CODED, torch.complex64)

    @property
    def form(self) -> str:
        """Name of what travels: the codec's text, or the dtype of values that none takes."""
        if self.uncoded:
            return str(self.parameter.dtype).removeprefix("torch.")
        return short_text(self.codec)

    @property
    def encoded_bytes(self) -> int:
        """Size of the parameter's payload."""
        if self.uncoded:
            return self.parameter.numel * self.parameter.value_bytes
        return self.codec.encoded_bytes(self.parameter.numel)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.parameter.shape)) or "scalar"
        return f"{self.parameter.name} ({shape}): {self.form}, {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Options of checks that compare samples of reduced gradients with their exact average.

    The cost of a check is bounded twice. It moves at most ``share`` of the payload bytes between
    two checks. Its time is measured, and while it is more than ``share`` of the time between two
    checks, the interval doubles. Both together stay below 2 * ``share``.
    """

    every: int = 16
    """Steps from one check to the next; three steps later for a parameter above its limit."""
    parameters: int = 8
    """Number of parameters in one check; the following parameters are in the next check."""
    share: float = 0.004
    """The largest cost of checks, as a fraction of bytes and of time each."""
    limit: float | None = None
    """Limit of an all-reduce's relative error. None: 1, where sending nothing would be as good; for
    codecs whose error on normal values is less than a half, half way from that error to 1; and
    never less than 1.5 times the error of the codec's all-reduce on normal values that differ as
    much from rank to rank. A parameter above the limit in two successive checks is warned about and
    moves to a finer codec."""
    escalate: bool = True
    """Tells whether such a parameter moves to a finer codec; else there is only the warning."""

    def limit_of(self, nominal: float, reduced: float) -> float:
        """Return the limit of a codec, from its errors on normal values.

        Args:
            nominal: error of one coding. Sparse codecs are near 1 by design. Some unbiased codecs
                are above 1: their errors cancel over many steps, so they have no limit.
            reduced: error of a whole all-reduce, which a check measures.
        """
        if self.limit is not None:
            return self.limit
        if nominal >= 1:
            return math.inf
        return max((1 + nominal) / 2 if nominal < 0.5 else 1.0, _MARGIN * reduced)

    def __post_init__(self) -> None:
        for name in ("every", "parameters"):
            put(self, **{name: whole(f"guard: {name}", getattr(self, name), 1)})
        put(self, share=number("guard: share", self.share))
        if not 0 < self.share <= 1:
            raise ValueError(f"guard: share={self.share} must be above 0 and at most 1")
        if self.limit not in (None, math.inf):
            put(self, limit=number("guard: limit", self.limit))
        typed("guard: escalate", self.escalate, bool)


@dataclass(frozen=True)
class Policy:
    """A default codec, and rules for exceptions; the first rule that matches wins.

    Raises:
        TypeError: a field has another type.
        ValueError: a codec does not exist, or options exclude each other.

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
    """Codec of parameters that no rule matches. "auto": the fastest codec that is accurate enough,
    by measured step time."""
    rules: tuple[Rule, ...] = PROTECT
    warmup: int = 0
    """Number of first steps in which everything is exact."""
    schedule: Schedule = ()
    """Codecs that follow ``codec``, each with the number of its first step, from 1."""
    error: float | None = None
    """With "auto": codecs with a larger error of the average, on normal values, are left out."""
    candidates: tuple[str | Codec, ...] = ()
    """Codecs from which "auto" chooses; (): a suitable default list."""
    factors: bool = True
    """Divide a matrix whose rows or columns differ in size by a power of two for each, before it is
    coded: so the error of each is small beside its own size, as optimizers need that divide by it,
    such as Adam."""
    guard: Guard | None = field(default_factory=Guard)
    """Compares samples of reduced gradients with their exact average; None: no checks."""

    def __post_init__(self) -> None:
        self._check_types()
        listed = [codec for _, codec in self.schedule]
        listed += [*self.candidates, *(rule.codec for rule in self.rules)]
        for codec in listed if self.codec == AUTO else (self.codec, *listed):
            parse_codec(codec)
        put(self, schedule=_in_order(self.schedule))
        if self.codec == AUTO and self.schedule:
            raise ValueError("policy: a schedule and auto both choose codecs; use one of them")
        if self.error is not None and not self.error > 0:
            raise ValueError(f"policy: error={self.error} must be above 0")
        if self.error is not None and self.codec != AUTO:
            raise ValueError(
                f"policy: error={self.error:g} bounds what auto chooses, and the codec is "
                f"{self.codec}: give it with auto, or leave it out"
            )
        if self.warmup < 0:
            raise ValueError(f"policy: warmup={self.warmup}: give a number of steps")

    def _check_types(self) -> None:
        typed("policy: codec", self.codec, str, Codec)
        typed("policy: guard", self.guard, Guard, None)
        typed("policy: factors", self.factors, bool)
        put(self, warmup=whole("policy: warmup", self.warmup, -math.inf))
        for name in ("rules", "schedule", "candidates"):
            typed(f"policy: {name}", getattr(self, name), tuple, list)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for rule in self.rules:
            typed("policy: a rule", rule, Rule)
        for turn in self.schedule:
            if not isinstance(turn, (tuple, list)) or len(turn) != 2:
                raise TypeError(f"policy: schedule: {turn!r} is no pair of a number and a codec")
        if self.error is not None:
            put(self, error=number("policy: error", self.error))

    @classmethod
    def of(cls, codec: str | Codec | Policy) -> Policy:
        """Return the policy for a text or codec; a policy is returned as it is.

        A text is a codec or "auto", followed by words that are separated by spaces: ``warmup=100``,
        ``error=0.1``, ``guard=off``, ``factors=off``, ``100:int8`` (int8 from step 100 on).

        Raises:
            TypeError: the argument is neither a text, a codec nor a policy.
            ValueError: a word is none of these, or a codec is unknown.
        """
        if isinstance(codec, Policy):
            return codec
        if isinstance(codec, Codec):
            return cls(codec)
        typed("codec", codec, str, Codec, Policy)
        return cls(**options(codec))

    def named(self) -> list[Codec]:
        """Return all codecs that the policy names in any field."""
        codecs = [] if self.codec == AUTO else [self.codec]
        codecs += [codec for _, codec in self.schedule]
        codecs += [*self.candidates, *(rule.codec for rule in self.rules)]
        return [parse_codec(codec) for codec in codecs]

    def terms(self) -> list[str]:
        """Return the policy's fields, a line for each; equal for policies that decide alike."""
        same = replace(
            self,
            codec=AUTO if self.codec == AUTO else parse_codec(self.codec),
            rules=tuple(replace(rule, codec=parse_codec(rule.codec)) for rule in self.rules),
            schedule=tuple((begin, parse_codec(codec)) for begin, codec in self.schedule),
            candidates=tuple(map(parse_codec, self.candidates)),
        )
        return [f"{f.name}={getattr(same, f.name)!r}" for f in fields(same)]

    def stage(self, step: int) -> tuple[bool, int]:
        """Return whether a step is in the warm-up, and the number of changes up to it.

        Decisions stay the same while the stage does.
        """
        return step <= self.warmup, sum(begin <= step for begin, _ in self.schedule)

    def rule(self, parameter: Parameter) -> Rule | None:
        """Return the first rule that matches a parameter, or None."""
        if parameter.exact:
            return Rule(codec=EXACT, reason=parameter.exact)
        if parameter.dtype.is_complex:
            return Rule(codec=EXACT, reason="complex numbers travel exactly")
        if parameter.dtype not in CODED:
            what = str(parameter.dtype).removeprefix("torch.")
            return Rule(codec=EXACT, reason=f"no codec takes {what}")
        return next((rule for rule in self.rules if rule.matches(parameter)), None)

    def decide(self, parameter: Parameter, step: int = 1, default: Codec | None = None) -> Decision:
        """Return the codec of one parameter and the reason.

        Args:
            parameter: the parameter.
            step: number of the step, from 1; equal on all ranks.
            default: measured codec for parameters that no rule matches; its reason is left empty.
        """
        warm, turns = self.stage(step)
        rule = self.rule(parameter)
        codec, reason = EXACT if self.codec == AUTO else self.codec, "default"
        if warm:
            codec, reason = EXACT, f"warm-up of {self.warmup} steps"
        elif rule is not None:
            codec, reason = rule.codec, rule.reason or f"rule for {rule.name}"
        elif default is not None:
            codec, reason = default, ""
        elif turns:
            begin, codec = self.schedule[turns - 1]
            reason = f"from step {begin}"
        return Decision(parameter, parse_codec(codec), reason)


def _in_order(schedule: Schedule) -> Schedule:
    """Return a schedule sorted by its steps."""
    for begin, codec in schedule:
        if isinstance(begin, bool) or not isinstance(begin, Integral) or begin < 0:
            raise ValueError(f"policy: schedule: {begin!r} for {codec} is no number of 0 or above")
    begins = [begin for begin, _ in schedule]
    if twice := [begin for begin in begins if begins.count(begin) > 1]:
        raise ValueError(f"policy: schedule: two codecs begin at {twice[0]}; leave one of them out")
    return tuple(
        sorted(((int(begin), codec) for begin, codec in schedule), key=lambda turn: turn[0])
    )


_TURN = re.compile(r"(\d+):(.+)")
_NUMBERS = ("warmup", "error")
_WORDS = "warmup=, error=, guard=off, factors=off, STEP:CODEC"


def options(text: str) -> dict[str, Any]:
    """Return a policy's options from its text; see `Policy.of`.

    Raises:
        ValueError: a word is unknown, or is given twice.
    """
    words = text.split()
    if not words:
        raise ValueError('policy: the text is empty; give a codec, such as "int8"')
    found: dict[str, Any] = {}
    if words[0].partition("=")[0] not in _NUMBERS:
        found["codec"] = words.pop(0)
    for word in words:
        turn = _TURN.fullmatch(word)
        name, _, value = word.partition("=")
        if turn:
            found["schedule"] = (*found.get("schedule", ()), (int(turn[1]), turn[2]))
        elif name in found:
            raise ValueError(f"policy: {name} is given twice in {text!r}")
        elif name in _NUMBERS:
            found[name] = _number(name, value)
        elif word == "guard=off":
            found["guard"] = None
        elif word == "factors=off":
            found["factors"] = False
        else:
            raise ValueError(f"policy: {word!r} in {text!r} is none of {_WORDS}")
    return found


def _number(name: str, value: str) -> int | float:
    try:
        return int(value) if name == "warmup" else float(value)
    except ValueError:
        raise ValueError(f"policy: {name}={value!r} is not a number") from None
