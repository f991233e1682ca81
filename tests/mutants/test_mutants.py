"""The mutants fit the sources: each can be made, and names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant, Stale

ROOT = Path(__file__).parents[2]


def test_every_mutant_finds_its_function_and_its_tests():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        assert mutant.applied(source) != source
        for argument in mutant.arguments:
            file, _, test = argument.partition("::")
            text, name = (ROOT / file).read_text(), test.partition("[")[0]
            assert not name or f"def {name}(" in text, mutant.name


SOURCE = """
void push(int value) { if (value < 3) return; wait(); }
int main() { return 0; }
"""


def made(function: str, old: str) -> Mutant:
    return Mutant("name", f"ring.cpp::{function}", old, "", "mutants/test_mutants.py")


def test_what_is_not_in_the_file_just_once_is_stale():
    assert made("main", "return 0;").applied(SOURCE) == SOURCE.replace("return 0;", "")
    with pytest.raises(Stale, match=r"no function Ring::pop"):
        made("Ring::pop", "return 0;").applied(SOURCE)
    for old, times in (("return 1;", 0), ("return", 2)):
        with pytest.raises(Stale, match=f"has {times} times: return"):
            made("push", old).applied(SOURCE)
