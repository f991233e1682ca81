"""The list of mutants fits the sources: each can be made, and names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, Stale, instrumented
from tests.mutants.parts import PARTS

ROOT = Path(__file__).parents[2]
MUTANTS = [mutant for mutants in PARTS.values() for mutant in mutants]
LEAST = 120


def faults(mutant: Mutant) -> list[str]:
    """Return what is wrong with an entry."""
    path = ROOT / mutant.file
    if not path.is_file():
        return [f"{mutant.name}: there is no {mutant.file}"]
    source = path.read_text()
    try:
        changed = mutant.applied(source) != source
    except Stale as error:
        return [str(error)]
    found = [] if changed else [f"{mutant.name}: it changes nothing"]
    if not mutant.arguments:
        found.append(f"{mutant.name}: it names no tests")
    for argument in mutant.arguments:
        file, _, test = argument.partition("::")
        name = test.partition("[")[0]
        if not (ROOT / file).is_file():
            found.append(f"{mutant.name}: there is no {file}")
        elif name and f"def {name}(" not in (ROOT / file).read_text():
            found.append(f"{mutant.name}: {file} has no {name}")
    return found


def test_every_mutant_fits_the_sources_and_names_tests_that_exist():
    assert [fault for mutant in MUTANTS for fault in faults(mutant)] == []


def test_mutants_of_one_file_do_not_overlap():
    for file in {mutant.file for mutant in MUTANTS}:
        compiled = [m for m in MUTANTS if m.file == file and m.form != "text"]
        assert instrumented((ROOT / file).read_text(), compiled).count("PYCOMM_MUTANT") == len(
            compiled
        )


def test_there_are_enough_and_each_has_a_name_and_a_number_of_its_own():
    assert len(MUTANTS) >= LEAST
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.number for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.number > 0 for mutant in MUTANTS)


SOURCE = "int f(int a) {\n  if (a < 3) return 1;\n  g(a);\n  g(a);\n  return a < 3;\n}\n"


def made(old: str, new: str, within: str = "") -> Mutant:
    return Mutant("name", "constant", "x.cpp", old, new, "tests/x.py", within)


def test_an_expression_and_a_statement_become_a_choice():
    entry = made("a < 3", "a < 4", "if (a < 3)")
    assert instrumented(SOURCE, [entry]) == SOURCE.replace(
        "if (a < 3)", f"if ((PYCOMM_MUTANT({entry.number}u) ? (a < 4) : (a < 3)))"
    )
    entry = made("return 1;", "")
    assert instrumented(SOURCE, [entry]) == SOURCE.replace(
        "return 1;", f"if (PYCOMM_MUTANT({entry.number}u)) {{  }} else {{ return 1; }}"
    )


def test_what_is_not_there_just_once_is_stale():
    for old, within in (("g(a);", ""), ("g(b);", ""), ("a", "if (a < 3) return a;")):
        with pytest.raises(Stale, match=r"x\.cpp has \d times"):
            made(old, "", within).place(SOURCE)


def test_overlapping_mutants_are_refused():
    with pytest.raises(Stale, match="overlap"):
        instrumented(SOURCE, [made("if (a < 3) return 1;", ""), made("return 1;", "")])
