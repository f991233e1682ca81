"""One table of options: everything that knows an option has it from there."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from pycomm import _C, _build
from pycomm.communicator import Communicator
from pycomm.reduction.refusals import MEMBERS, REFUSALS, UNBIASED
from tests.compiling import compile_cpp
from tests.options import ROOT, rows, written

TABLE = "csrc/core/option_table.h"
DEFAULTS = {row.option: getattr(_C.GroupOptions(), row.option) for row in rows() if row.option}
TOY = 'GROUP_OPTION(int, toy, 3, "PYCOMM_TOY", whole(1, 9), same, tcp, "a toy, 1 to 9", "", "");\n'
PROGRAM = """
#include <cstdio>
#include "core/env.h"
#include "core/error.h"
int main() {
  try {
    std::printf("%d %d\\n", pycomm::GroupOptions().toy, pycomm::env().toy);
    for (const auto& row : pycomm::option_rows())
      if (row.name == std::string("toy"))
        std::printf("%s %d %s\\n", row.meaning, row.same, row.acts);
  } catch (const pycomm::Error& error) {
    std::puts(error.what());
  }
}
"""


@pytest.mark.parametrize("file", ["docs/api/backend.md", "docs/combine.md"])
def test_written_lines_are_those_of_the_table(file):
    """`python -m tests.options` writes them."""
    assert (ROOT / file).read_text() == written()[ROOT / file]


def test_no_refusal_is_dead():
    """Those that `pycomm.reduction.refusals` itself looks up aside, other files name the option."""
    table = ROOT / "pycomm/reduction/refusals.py"
    sources = [file.read_text() for file in (ROOT / "pycomm").rglob("*.py") if file != table]
    named = "".join(sources) + MEMBERS + UNBIASED
    assert [
        option for of_one in REFUSALS.values() for option in of_one if option not in named
    ] == []


def test_every_row_names_an_existing_page():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    for row in rows():
        assert row.meaning
        assert row.default not in ("", "``")
        page, _, anchor = row.page.partition("#")
        if page:
            text = (ROOT / "docs" / page).read_text().lower()
            assert not anchor or f"# {anchor.replace('-', ' ')}\n" in text


def test_every_binding_has_the_options_of_the_table():
    options = _C.CommunicatorOptions(), _build.load_c10d().Options(**DEFAULTS)
    for name, value in DEFAULTS.items():
        assert [getattr(one, name) for one in options] == [value] * 2
    Communicator(None, 0, 1, **DEFAULTS).close()


@pytest.mark.parametrize("name", ["congestoin", "__doc__"])
def test_an_unknown_option_is_refused(name):
    with pytest.raises(TypeError, match=f"no option '{name}'"):
        Communicator(None, 0, 1, **{name: "cubic"})


def test_one_row_makes_an_option(tmp_path):
    shutil.copytree(ROOT / "csrc/core", tmp_path / "core")
    copy = tmp_path / "core" / (ROOT / TABLE).name
    text = copy.read_text()
    first = text.index("GROUP_OPTION(std::string")
    copy.write_text(text[:first] + TOY + text[first:])
    program, source = tmp_path / "program", tmp_path / "program.cpp"
    source.write_text(f'{PROGRAM}#include "core/env.cpp"\n')
    compile_cpp(source, program, "-std=c++17", "-I", tmp_path)

    def run(**variables: str) -> list[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOMM_")}
        done = subprocess.run([program], env=clean | variables, capture_output=True, text=True)
        return done.stdout.splitlines()

    assert run() == ["3 3", "a toy, 1 to 9 1 tcp"]
    assert run(PYCOMM_TOY="4")[0] == "3 4"
    expected = "expected a whole number from 1 to 9"
    assert run(PYCOMM_TOY="x") == [f"PYCOMM_TOY=x is invalid: {expected}"]
