"""Loading `_c10d`: it is found if it fits torch, else compiled once; failures are explained."""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pycomm import _build
from pycomm.errors import Error
from tests.torch.interpreter import ROOT, run


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the folder of an installed package with sources; _c10d is not loaded yet."""
    folder = tmp_path / "pycomm"
    (folder / "csrc/binding/torch").mkdir(parents=True)
    (folder / "csrc/binding/torch/backend.cpp").write_text("source")
    (folder / "csrc/binding/module.map").write_text("exports")
    (folder / "CMakeLists.txt").write_text("flags")
    monkeypatch.setattr(_build, "PACKAGE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "pycomm._c10d", raising=False)
    monkeypatch.setattr(_build, "import_c10d", lambda binary: binary)
    return folder


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


def test_ranks_that_ask_together_compile_once(package, compiled, monkeypatch):
    monkeypatch.setattr(_build, "_loading", nullcontext())  # the threads stand for processes
    with ThreadPoolExecutor(4) as ranks:
        found = set(ranks.map(lambda _: _build.load_c10d(), range(4)))
    assert len(compiled) == 1
    assert len(found) == 1
    assert _build.load_c10d() in found
    assert len(compiled) == 1


def test_threads_that_ask_together_load_once(package, compiled, monkeypatch):
    loads = []

    def load(binary: Path) -> Path:
        loads.append(binary)
        time.sleep(0.1)
        monkeypatch.setitem(sys.modules, "pycomm._c10d", ModuleType("pycomm._c10d"))
        return binary

    monkeypatch.setattr(_build, "import_c10d", load)
    (package / "_c10d.torch").write_text(torch.__version__ + "\n")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _build.load_c10d(), range(4)))
    assert len(loads) == 1


def test_other_torch_is_named_and_compiled_for(package, compiled, caplog):
    (package / "_c10d.torch").write_text("1.0\n")
    _build.load_c10d()
    assert len(compiled) == 1
    said = caplog.text
    assert "torch 1.0" in said
    assert torch.__version__ in said


@pytest.mark.parametrize("file", ["torch/backend.cpp", "module.map"])
def test_changed_sources_are_compiled_again(package, compiled, file):
    first = _build.load_c10d()
    (package / "csrc/binding" / file).write_text("another")
    assert _build.load_c10d() != first
    assert len(compiled) == 2


def test_fitting_build_is_loaded_as_it_is(package, compiled, monkeypatch):
    (package / "_c10d.torch").write_text(torch.__version__ + "\n")
    assert _build.load_c10d() == package / _build.BINARY
    assert compiled == []


@pytest.fixture
def prebuilt(package):
    """Put the prebuilt binaries of a wheel into the package."""

    def put(*minors: str) -> None:
        for minor in minors:
            folder = package / "_prebuilt" / minor
            folder.mkdir(parents=True)
            (folder / _build.BINARY).touch()

    return put


@pytest.mark.parametrize("version", ["2.14.0", "2.14.9+cu130", "2.14.0a0+git1234"])
def test_every_build_takes_its_minors_prebuilt_binary(
    package, prebuilt, compiled, monkeypatch, version
):
    prebuilt("2.1", "2.13", "2.14")
    monkeypatch.setattr(torch, "__version__", version)
    assert _build.load_c10d() == package / "_prebuilt/2.14" / _build.BINARY
    assert _build.find_c10d(version) == ("prebuilt", _build.load_c10d())
    assert compiled == []


def test_a_torch_that_the_wheel_does_not_know_is_compiled_for(
    package, prebuilt, compiled, monkeypatch, caplog
):
    prebuilt("2.13", "2.9")
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    found = _build.load_c10d()
    assert found.parent == compiled[0]
    assert "the wheel has it for torch 2.9, 2.13" in caplog.text
    assert _build.find_c10d("2.16.0") == ("compiled", found)


@pytest.mark.parametrize("kind", ["installed", "prebuilt"])
def test_a_delivered_binary_that_does_not_load_is_replaced(
    package, prebuilt, compiled, monkeypatch, caplog, kind
):
    if kind == "prebuilt":
        prebuilt("2.14")
    else:
        (package / "_c10d.torch").write_text("2.14.0\n")
    monkeypatch.setattr(torch, "__version__", "2.14.0")

    def load(binary: Path) -> Path:
        if "cache" not in binary.parts:
            raise ImportError("undefined symbol: x")
        return binary

    monkeypatch.setattr(_build, "import_c10d", load)
    assert _build.load_c10d().parent == compiled[0]
    assert f"the {kind} one does not load: undefined symbol: x" in caplog.text


def test_a_compiled_binary_that_does_not_load_is_named(package, compiled, monkeypatch):
    _build.load_c10d()

    def load(binary: Path) -> Path:
        raise ImportError("file too short")

    monkeypatch.setattr(_build, "import_c10d", load)
    with pytest.raises(Error, match="does not load: file too short; remove that file"):
        _build.load_c10d()
    assert len(compiled) == 1


def test_two_torches_compile_in_turn(package, monkeypatch):
    running, most = [], []

    def compile_into(folder: Path) -> None:
        running.append(folder)
        most.append(len(running))
        time.sleep(0.1)
        (folder / _build.BINARY).touch()
        running.remove(folder)

    monkeypatch.setattr(_build, "_compile", compile_into)

    def build(version: str) -> None:
        folder = _build._folder_of(version)
        _build._prepare(folder)
        with _build._locked(folder.parent):
            _build._compile_aloud(folder, version, "none")

    with ThreadPoolExecutor(2) as processes:
        list(processes.map(build, ["2.14.0", "2.15.0"]))
    assert most == [1, 1]


@pytest.mark.parametrize("part", ["home", "folder", "binary"])
def test_what_others_can_write_is_not_loaded(package, compiled, monkeypatch, part):
    """Whoever can write into the cache could run code in every rank."""
    planted = _build.load_c10d()
    assert package.parent / "cache/pycomm" in planted.parents
    compiled.clear()
    parts = {"home": planted.parents[1], "folder": planted.parent, "binary": planted}
    parts[part].chmod(0o777)
    assert _build.find_c10d(torch.__version__) is None
    with pytest.raises(Error, match=re.escape(f"{parts[part]} can be written by other users")):
        _build.load_c10d()
    assert compiled == []
    parts[part].chmod(0o755)
    assert _build.load_c10d() == planted


def test_a_torch_too_old_is_refused(package, compiled, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(Error, match=r"torch 2\.10\.1 is too old for pycomm: install torch 2\.11"):
        _build.load_c10d()
    assert compiled == []


def test_no_writable_folder_is_an_error(package, compiled):
    (package.parent / "cache").write_text("a file, so that no folder can be made here")
    with pytest.raises(Error, match="set XDG_CACHE_HOME"):
        _build.load_c10d()


def test_failure_has_the_words_of_the_tool(package):
    (package / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such flag")')
    with pytest.raises(Error, match="no such flag"):
        _build.load_c10d()


def test_missing_tool_is_named_with_a_remedy(package, monkeypatch):
    monkeypatch.setattr(_build.shutil, "which", lambda tool, path=None: None)
    with pytest.raises(Error, match=r"no cmake, no ninja.*pip install .pycomm\[compile\]"):
        _build.load_c10d()


def test_no_rank_sees_a_binary_that_is_still_being_written(package, monkeypatch):
    folder, seen = package.parent / "cache", []
    folder.mkdir()

    def run(command: list[str]) -> None:
        if "--build" in command:
            Path(command[-1], _build.BINARY).write_text("the binary")

    def copy(source: Path, to: Path) -> None:
        Path(to).write_text("half")
        seen.append((folder / _build.BINARY).exists())
        Path(to).write_text(Path(source).read_text())

    monkeypatch.setattr(_build, "missing_tools", list)
    monkeypatch.setattr(_build, "_run", run)
    monkeypatch.setattr(_build.shutil, "copy", copy)
    _build._compile(folder)
    assert seen == [False]
    assert (folder / _build.BINARY).read_text() == "the binary"


FUTURE = """
import torch
torch.__version__ = "2.99.0"
import torch.distributed as dist, pycomm.backend
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_unknown_torch_without_a_compiler_is_an_error_with_all_reasons(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYCOMM_")}
    env |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = run("-c", FUTURE, env=env, cwd=tmp_path)
    assert done.returncode != 0
    for text in ("there is no _c10d for torch 2.99.0: found one for torch ", "there is no ", "c++"):
        assert text in done.stderr
