"""Loading `_c10d`: it is found if it fits torch, else compiled once; failures are explained."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pycomm import _build
from pycomm.errors import Error


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the folder of an installed package with sources; _c10d is not loaded yet."""
    (tmp_path / "csrc/binding/torch").mkdir(parents=True)
    (tmp_path / "csrc/binding/torch/backend.cpp").write_text("source")
    (tmp_path / "CMakeLists.txt").write_text("flags")
    monkeypatch.setattr(_build, "PACKAGE", tmp_path)
    monkeypatch.delitem(sys.modules, "pycomm._c10d", raising=False)
    monkeypatch.setattr(_build, "_import_from", lambda binary: binary)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compiler; return the list of folders in which it was called."""
    folders = []

    def compile_into(folder: Path) -> None:
        folders.append(folder)
        time.sleep(0.2)  # long enough for the other ranks to request it too
        (folder / _build.BINARY).touch()

    monkeypatch.setattr(_build, "_compile", compile_into)
    return folders


def test_ranks_that_ask_together_compile_once(package, compiled):
    with ThreadPoolExecutor(4) as ranks:
        found = set(ranks.map(lambda _: _build.load_c10d(), range(4)))
    assert len(compiled) == 1
    assert len(found) == 1
    assert _build.load_c10d() in found
    assert len(compiled) == 1


def test_other_torch_is_named_and_compiled_for(package, compiled, capsys):
    (package / "_c10d.torch").write_text("1.0\n")
    _build.load_c10d()
    assert len(compiled) == 1
    said = capsys.readouterr().err
    assert "torch 1.0" in said
    assert torch.__version__ in said


def test_changed_sources_are_compiled_again(package, compiled):
    first = _build.load_c10d()
    (package / "csrc/binding/torch/backend.cpp").write_text("other source")
    assert _build.load_c10d() != first
    assert len(compiled) == 2


def test_folder_that_cannot_be_written_falls_back_to_the_cache(package, compiled, monkeypatch):
    home = package / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    (package / "_built").write_text("a file, so that no folder can be made here")
    found = _build.load_c10d()
    assert home / ".cache/pycomm" in found.parents


def test_fitting_build_is_loaded_as_it_is(package, compiled, monkeypatch):
    (package / "_c10d.torch").write_text(torch.__version__ + "\n")
    shipped = ModuleType("pycomm._c10d")
    monkeypatch.setattr(_build.importlib, "import_module", lambda name: shipped)
    assert _build.load_c10d() is shipped
    assert compiled == []


def test_failure_has_the_words_of_the_tool(package):
    (package / "CMakeLists.txt").write_text('message(FATAL_ERROR "Error: no such flag")')
    with pytest.raises(Error, match="no such flag"):
        _build.load_c10d()


def test_missing_tool_is_named_with_a_remedy(package, monkeypatch):
    monkeypatch.setattr(_build.shutil, "which", lambda tool: None)
    with pytest.raises(Error, match="no cmake: pip install cmake ninja"):
        _build.load_c10d()
