"""Mutant: one small change to the sources that some test should notice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "wait",  # a wait dropped, or what ends it
    "order",  # another order, rank or random number
    "residual",  # not written, not added, or another
    "bound",  # a bound or a comparison that lets everything pass
]


class Stale(ValueError):
    """An entry does not fit the sources any more."""


@dataclass(frozen=True)
class Mutant:
    """A change to one function, and the tests that should notice it.

    `place` is the file and the function, with its classes: `csrc/queue.cpp::Queue::post` in C++,
    `pycomm/bucket.py::Bucket.pack` in Python. `old` occurs once in that file.
    """

    name: str
    place: str
    old: str
    new: str
    tests: str
    """Arguments for pytest, from the folder tests on, separated by blanks."""
    kind: Kind = "bound"

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    @property
    def function(self) -> str:
        return self.place.partition("::")[2]

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(f"tests/{test}" for test in self.tests.split())

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/")

    def applied(self, source: str) -> str:
        """Return the file's text with the change.

        Raises:
            Stale: the file does not name the function, or does not have `old` just once.
        """
        name = self.function.replace("::", ".").split(".")[-1]
        if not re.search(rf"\b{name}\b", source):
            raise Stale(f"{self.name}: {self.file} has no function {self.function}")
        if (times := source.count(self.old)) != 1:
            line = self.old.strip().splitlines()[0]
            raise Stale(f"{self.name}: {self.file} has {times} times: {line}")
        return source.replace(self.old, self.new)
