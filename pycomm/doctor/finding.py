"""What the doctor finds: one line, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("ok", "note", "warning", "problem")
"""From good to bad. A note costs nothing that was asked for; a warning costs speed or comfort; with
a problem something does not work."""
STATUS = {"ok": 0, "note": 0, "warning": 3, "problem": 1}
"""The exit status by the worst level; 2 is a wrong command line."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    topic: str
    """heading under which it stands"""
    name: str
    text: str
    """what is so; one line"""
    advice: str = ""
    """what to do; warnings and problems have it"""
    where: str = ""
    """which ranks have it, if not the one that tells"""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"unknown level {self.level!r}: use one of {', '.join(LEVELS)}")
        if self.level in ("warning", "problem") and not self.advice:
            raise ValueError(f"a {self.level} must say what to do: {self.text}")


def worst(findings: Iterable[Finding]) -> str:
    """The worst level of all."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
