"""Findings of the doctor: one line each, with a level and advice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partialmethod

LEVELS = ("ok", "note", "warning", "problem")
"""Levels from good to bad. A note costs nothing that was asked for; a warning costs speed or
comfort; with a problem something does not work."""
STATUS = {"ok": 0, "note": 0, "warning": 3, "problem": 1}
"""Exit status by the worst level; 2 is a wrong command line."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    topic: str
    """Heading under which the finding is printed."""
    name: str
    text: str
    """The fact that was found; one line."""
    advice: str = ""
    """The advice; warnings and problems have it."""
    where: str = ""
    """The ranks concerned, if not the reporting one."""


@dataclass(frozen=True)
class Topic:
    """A heading of the report, and what makes the findings below it."""

    title: str

    def finding(self, level: str, name: str, text: str, advice: str = "") -> Finding:
        return Finding(level, self.title, name, text, advice)

    ok = partialmethod(finding, "ok")
    note = partialmethod(finding, "note")
    warning = partialmethod(finding, "warning")
    problem = partialmethod(finding, "problem")


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst level of all findings."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
