"""Functions of a source by their qualified names: in Python by its grammar, in C++ by braces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import accumulate

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
