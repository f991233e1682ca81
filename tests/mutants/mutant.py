"""Mutant: one small change to the sources that some test should notice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
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
    `pycomm/bucket.py::Bucket.pack` in Python. `old` occurs once in that function (or in one of its
    overloads).
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
            Stale: the function is not there, or does not have `old` just once.
        """
        spans = [span for name, span in functions(self.file, source) if name == self.function]
        if not spans:
            raise Stale(f"{self.name}: {self.file} has no function {self.function}")
        if (times := sum(source[begin:end].count(self.old) for begin, end in spans)) != 1:
            line = self.old.strip().splitlines()[0]
            raise Stale(f"{self.name}: {self.function} in {self.file} has {times} times: {line}")
        (at,) = (b + source[b:e].index(self.old) for b, e in spans if self.old in source[b:e])
        return source[:at] + self.new + source[at + len(self.old) :]


# ------------------------------------------------------------ the functions of a source
# By their qualified names: in Python by its grammar, in C++ by braces.

Span = tuple[int, int]
# What hides braces: comments, texts and characters.
HIDDEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
NAME = re.compile(r"(operator\s*(?:\(\)|[^\s\w(]+)|~?\w+(?:::~?\w+)*)\s*\(")
SCOPE = re.compile(r"\b(?:namespace|class|struct|union)\b(?:\s+alignas\([^)]*\))?\s*([\w:]*)")
INITIALIZERS = re.compile(r"\)[\w\s]*:(?!:)")


def functions(file: str, source: str) -> Iterator[tuple[str, Span]]:
    """Yield each function's name, as `Class::method` or `Class.method`, and where its text is."""
    yield from (_in_python if file.endswith(".py") else _in_cpp)(source)


def _in_python(source: str) -> Iterator[tuple[str, Span]]:
    lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def inside(node: ast.AST, outer: str) -> Iterator[tuple[str, Span]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from inside(child, outer)
                continue
            name = f"{outer}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, (lines[child.lineno - 1], lines[child.end_lineno or 0])
            yield from inside(child, f"{name}.")

    yield from inside(ast.parse(source), "")


def _in_cpp(source: str) -> Iterator[tuple[str, Span]]:
    text = HIDDEN.sub(lambda hidden: " " * len(hidden[0]), source)
    text = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", lambda line: " " * len(line[0]), text, flags=re.M)
    scopes: list[str] = []
    begin = at = 0  # of the declaration; of what is looked at
    while found := re.compile(r"[;{}]").search(text, at):
        at = found.end()
        head = text[begin : found.start()]
        if head.count("(") > head.count(")"):  # in a default argument, or in a for
            at = _end_of_block(text, found.start()) if found[0] == "{" else at
        elif found[0] == "}":
            scopes.pop()
            begin = at
        elif found[0] == ";":
            begin = at
        elif not (name := NAME.search(head)) and (scope := SCOPE.search(head)):
            scopes.append(scope[1] if "namespace" not in scope[0] else "")
            begin = at
        else:
            at = _end_of_block(text, found.start())
            # Values of a variable, or of a member before a constructor's body.
            values = name is None or "=" in head[: name.start()]
            if INITIALIZERS.search(head) and re.search(r"\w\s*$", head):
                continue
            if not values:
                assert name is not None
                outer = [scope for scope in scopes if scope]
                yield "::".join([*outer, name[1]]), (begin, at)
            begin = at


def _end_of_block(text: str, begin: int) -> int:
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    raise ValueError("a brace is not closed")
