"""Mutant: one small change to the sources that some test should notice."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

Kind = Literal[
    "comparison",  # turned, or its bound moved
    "constant",  # off by one, or another
    "rank",  # another rank, chunk, row, side or place
    "order",  # of a sum, of messages, of calls
    "wait",  # a wait, a fence or a wake-up dropped
    "check",  # of arguments, tags, sizes or failures dropped
    "sign",
    "arithmetic",  # rounding, scale, factor, divisor
    "residual",  # not written, not subtracted, not added
    "random",  # another seed, step or word
    "error",  # swallowed, of another class, without its cause
    "deadline",  # not passed on, or another
    "state",  # a flag not cleared, something not saved or not given back
]
Form = Literal["expression", "statement", "text"]


class Stale(ValueError):
    """An entry does not fit the sources any more."""


@dataclass(frozen=True)
class Mutant:
    """A change to one file, and the tests that should notice it.

    `old` occurs once in the file, or once in `within`, which does. In C++ `old` is a whole
    expression, or whole statements without declarations: both versions are compiled, and a
    variable of the environment chooses (`form`). Python, Triton and CUDA are changed as text.
    """

    name: str
    kind: Kind
    file: str
    old: str
    new: str
    tests: str
    """Arguments for pytest, separated by blanks."""
    within: str = ""
    escapes: str = ""
    """The reason for which no test notices it; "": one must."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.tests.split())

    @property
    def number(self) -> int:
        """The number by which the environment chooses it; it stays when others come and go."""
        return zlib.crc32(self.name.encode())

    @property
    def form(self) -> Form:
        path = Path(self.file)
        if path.suffix in (".py", ".cu") or path.name.endswith("_cuda.h"):
            return "text"
        return "statement" if self.old.rstrip().endswith((";", "}")) else "expression"

    def place(self, source: str) -> tuple[int, int]:
        """Return where `old` begins and ends in the file's text.

        Raises:
            Stale: it is not there, or not just once.
        """
        around = self.within or self.old
        for text, inside in ((around, source), (self.old, around)):
            if (times := inside.count(text)) != 1:
                first = text.strip().splitlines()[0]
                raise Stale(f"{self.name}: {self.file} has {times} times: {first}")
        begin = source.index(around) + around.index(self.old)
        return begin, begin + len(self.old)

    def applied(self, source: str) -> str:
        """Return the file's text with the change alone."""
        begin, end = self.place(source)
        return source[:begin] + self.new + source[end:]

    def chosen(self) -> str:
        """Return C++ that does what `new` says if the environment chooses this mutant."""
        chosen = f"PYCOMM_MUTANT({self.number}u)"
        if self.form == "statement":
            return f"if ({chosen}) {{ {self.new} }} else {{ {self.old} }}"
        return f"({chosen} ? ({self.new}) : ({self.old}))"


def instrumented(source: str, mutants: Iterable[Mutant]) -> str:
    """Return a C++ file's text with both versions of each of its mutants.

    Raises:
        Stale: one does not fit, or two overlap.
    """
    places = sorted(((*m.place(source), m) for m in mutants), key=lambda place: place[:2])
    for (_, end, one), (begin, _, other) in pairwise(places):
        if begin < end:
            raise Stale(f"{one.name} and {other.name} overlap in {one.file}")
    for begin, end, mutant in reversed(places):
        source = source[:begin] + mutant.chosen() + source[end:]
    return source
