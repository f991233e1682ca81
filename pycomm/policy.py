"""Which codec each parameter's gradient travels with, and why.

A policy is data: a default codec and rules, tried in order. It decides from names, shapes and
dtypes alone, so every rank comes to the same answer; `agree` checks that once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist

from pycomm.codecs import Cast, Codec
from pycomm.codecs import codec as parse_codec
from pycomm.errors import WireMismatch

logger = logging.getLogger("pycomm")

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
                reason = rule.reason or f"rule for {rule.name}"
                return Decision(parameter, parse_codec(rule.codec), reason)
        return Decision(parameter, parse_codec(self.codec), "default")


def summary(decisions: Iterable[Decision]) -> str:
    """One line per codec and reason: how many parameters, values and bytes; for people."""
    groups: dict[tuple[str, str], list[Decision]] = {}
    for decision in decisions:
        groups.setdefault((decision.codec.spec(), decision.reason), []).append(decision)
    lines = []
    for (spec, reason), members in groups.items():
        numel = sum(d.parameter.numel for d in members)
        size = sum(d.codec.encoded_bytes(d.parameter.numel) for d in members)
        few = ", ".join(d.parameter.name for d in members[:3]) + (", ..." * (len(members) > 3))
        lines.append(
            f"{spec} ({reason}): {len(members)} parameters, {numel} values in {size} bytes: {few}"
        )
    return "\n".join(lines)


def agree(decisions: Sequence[Decision], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of a group have decided alike, and log the decisions on rank 0.

    Every rank must call it: two small all-gathers, the second only after a difference.

    Raises:
        WireMismatch: on all ranks alike; names the ranks and the first difference.
    """
    mine = [str(decision) for decision in decisions]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    all_digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(all_digests, own, group=group)
    if any(not torch.equal(other, all_digests[0]) for other in all_digests):
        everybody: list[list[str]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everybody, mine, group=group)
        raise WireMismatch(_difference(everybody))
    if group.rank() == 0:
        for line in summary(decisions).splitlines():
            logger.info("policy: %s", line)


def _difference(everybody: list[list[str]]) -> str:
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        if theirs == first:
            continue
        here, there = next(
            ((a, b) for a, b in zip(first, theirs, strict=False) if a != b),
            (f"{len(first)} parameters", f"{len(theirs)} parameters"),
        )
        return (
            f"ranks do not compress alike: rank 0 has {here!r}, rank {rank} has {there!r}; "
            "give every rank the same model and the same codec or policy"
        )
    return "ranks do not compress alike"
