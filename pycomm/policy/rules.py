"""What a user says about codecs: a default and rules, as data.

It decides from names, shapes and dtypes alone, so every rank comes to the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from pycomm.codecs import Cast, Codec
from pycomm.codecs import codec as parse_codec

EXACT = "fp32"


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
    reason: str = ""
    """Goes into the log."""

    def matches(self, parameter: Parameter) -> bool:
        """Whether all conditions hold."""
        return (
            fnmatchcase(parameter.name, self.name)
            and parameter.numel >= self.min_numel
            and (self.max_numel is None or parameter.numel <= self.max_numel)
            and (self.max_dims is None or len(parameter.shape) <= self.max_dims)
            and (self.dtype is None or parameter.dtype == self.dtype)
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

    def __str__(self) -> str:
        shape = "x".join(map(str, self.parameter.shape)) or "scalar"
        return f"{self.parameter.name} ({shape}): {self.codec.spec()}, {self.reason}"


@dataclass(frozen=True)
class Policy:
    """A codec for everything, and rules for what needs another. The first rule that matches wins.

    Example:
        >>> from pycomm.policy import PROTECT, Parameter, Policy, Rule
        >>> import torch
        >>> policy = Policy("int4", (Rule(codec="int8", name="head.*"), *PROTECT))
        >>> weight = Parameter("head.weight", (64, 64), torch.float32)
        >>> policy.decide(weight).codec.spec()
        'quant:bits=8,block=256,rounding=nearest'
    """

    codec: str | Codec = "int8"
    rules: tuple[Rule, ...] = PROTECT

    def __post_init__(self) -> None:
        for spec in (self.codec, *(rule.codec for rule in self.rules)):
            if parse_codec(spec).combine == "gather":
                raise ValueError(f"codec {spec} cannot be added up at an owner; use another one")

    def decide(self, parameter: Parameter) -> Decision:
        """Return the codec of one parameter and the reason."""
        for rule in self.rules:
            if rule.matches(parameter):
                return _fitted(parameter, rule.codec, rule.reason or f"rule for {rule.name}")
        return _fitted(parameter, self.codec, "default")


def _fitted(parameter: Parameter, spec: str | Codec, reason: str) -> Decision:
    codec = parse_codec(spec)
    fitted = codec.fit(parameter.shape)
    if fitted.name != codec.name:
        reason = f"{codec.name} does not fit its shape"
    return Decision(parameter, fitted, reason)
