"""What a release contains and exports, and that its workflows call what there is."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import setuptools
import yaml
from setuptools.config.pyprojecttoml import read_configuration

import pycomm
from pycomm import _C, _build
from release import __main__ as release
from release import smoke, torches

ROOT = Path(__file__).parent.parent
CONFIGURATION = read_configuration(ROOT / "pyproject.toml", expand=False)
FOLDERS = {"pycomm": "pycomm", "bench": "pycomm.bench", "triton_kernels": "pycomm.triton_kernels"}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def tracked(*folders: str) -> list[Path]:
    """Return the files of the repository in these folders."""
    command = ["git", "ls-files", "-z", *folders]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout of git")
    return [Path(name) for name in listed.stdout.split("\0") if name]


def test_a_wheel_has_every_file_beside_its_modules():
    """But for the tables in bench/results."""
    listed = CONFIGURATION["tool"]["setuptools"]["package-data"]
    absent = []
    for path in tracked(*FOLDERS):
        if path.suffix == ".py" or path.is_relative_to("bench/results"):
            continue
        package = ".".join([FOLDERS[path.parts[0]], *path.parts[1:-1]])
        if not any(fnmatch(path.name, pattern) for pattern in listed.get(package, ())):
            absent.append(str(path))
    assert absent == []


def test_a_source_distribution_has_what_the_build_reads():
    manifest = (ROOT / "MANIFEST.in").read_text().splitlines()
    included = {word for line in manifest for word in line.split()[1:]}
    assert {"CMakeLists.txt", "csrc"} <= included
    for path in tracked("bench"):
        if path.suffix == ".cpp":
            assert str(path) in included


def test_the_licence_of_each_part_is_in_a_wheel():
    listed = CONFIGURATION["project"]["license-files"]
    found = {str(p.relative_to(ROOT)) for pattern in listed for p in ROOT.glob(pattern)}
    assert found == {"LICENSE", "release/licenses/pybind11.txt", "release/licenses/pytorch.txt"}


def test_the_version_is_in_one_place():
    version = CONFIGURATION["project"]["version"]
    elsewhere = [
        str(path)
        for path in tracked("pycomm", "release", "setup.py", "CMakeLists.txt", "mkdocs.yml")
        if path.suffix in (".py", ".toml", ".txt", ".yml")
        and re.search(rf"version\W+{re.escape(version)}\b", (ROOT / path).read_text())
    ]
    assert elsewhere == []
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == version


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_and_files_that_exist(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    script = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"\bmake ([\w-]+)", script)
    assert set(called) <= targets
    files = re.findall(r"\b(?:bash|sh) (\S+)", script)
    modules = re.findall(r"-m (release[\w.]*)", script)
    for file in [*files, *(f"{m.replace('.', '/')}" for m in modules)]:
        assert (ROOT / file).exists() or (ROOT / f"{file}.py").exists()


def test_ci_runs_the_common_script():
    (ci,) = (path for path in WORKFLOWS if path.stem == "ci")
    jobs = yaml.safe_load(ci.read_text())["jobs"].values()
    assert "bash .ci/run" in [step.get("run") for job in jobs for step in job["steps"]]


@pytest.fixture
def defaults(monkeypatch):
    """Return what setup.py chooses by itself, with GPUs here or without, and what it prints."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    command = runpy.run_path(str(ROOT / "setup.py"))["CMakeBuild"]
    for name in ("PYCOMM_CUDA", "PYCOMM_CUDA_ARCH"):
        monkeypatch.delenv(name, raising=False)

    def choose(gpus: bool) -> dict[str, str]:
        monkeypatch.setattr(Path, "exists", lambda path: gpus)
        return command(setuptools.Distribution()).for_these_gpus()

    return choose


def test_kernels_are_compiled_for_the_gpus_that_are_here(defaults, monkeypatch, capsys):
    assert defaults(gpus=True) == {"PYCOMM_CUDA_ARCH": "local"}
    assert "for the GPUs of this machine" in capsys.readouterr().out
    assert defaults(gpus=False) == {"PYCOMM_CUDA": "OFF"}
    assert "no GPU here, so no CUDA kernels" in capsys.readouterr().out
    monkeypatch.setenv("PYCOMM_CUDA_ARCH", "90")
    assert defaults(gpus=True) == {}


def test_releases_match_the_documented_versions():
    built = CONFIGURATION["tool"]["cibuildwheel"]
    pythons = re.findall(r"cp3(\d+)-", built["build"])
    page = (ROOT / "docs/install.md").read_text()
    assert f"3.{pythons[0]} to 3.{pythons[-1]}" in page
    assert CONFIGURATION["project"]["requires-python"] == f">=3.{pythons[0]}"
    assert ", ".join(torches.MINORS) in page
    assert set(built["archs"]) == {"x86_64", "aarch64"}
    assert [f"3.{python}" for python in pythons[:-1]] == list(release.PYTHONS)


class Pip:
    """Takes the place of `subprocess.run`: it has torch 2.13 alone."""

    def __call__(self, command, **_):
        if any(str(word).startswith("torch==2.13") for word in command):
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1], "torch-2.13.whl"), "w"
            ) as file:
                file.writestr("torch/version.py", "")
            return subprocess.CompletedProcess(command, 0, "", "")
        said = "noise\nERROR: No matching distribution found for torch\nnoise\n"
        failed = any("torch=" in str(word) for word in command)
        return subprocess.CompletedProcess(command, int(failed), "", said)


def test_a_torch_that_cannot_be_fetched_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", Pip())
    assert torches.fetch_all(tmp_path, ("2.99", "2.13.0+cpu")) == ["2.13.0+cpu"]
    assert (tmp_path / "2.13/torch/version.py").exists()
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("release: torch 2.99 for cp")
    assert said.endswith(": No matching distribution found for torch")
    with pytest.raises(SystemExit, match=r"no torch of 2\.99 for this Python"):
        torches.fetch_all(tmp_path, ("2.99",))


def test_a_torch_that_cannot_be_installed_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "HOME", tmp_path)
    monkeypatch.setattr(subprocess, "run", Pip())
    wheel = tmp_path / "pycomm-0-cp311-cp311-linux.whl"
    wheel.touch()
    for version in ("2.99", "2.99.0+cpu"):
        with pytest.raises(smoke.LeftOut, match="No matching distribution"):
            smoke.try_on(version, wheel, sys.executable)


def test_a_release_takes_interpreters_that_run(tmp_path, monkeypatch):
    here = "{}.{}".format(*sys.version_info)
    other = tmp_path / "versions/3.98.1/bin/python"
    for file, code in ((other, "0"), (tmp_path / "bin/python3.99", "1")):
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}")
    assert release.interpreter("3.98") == str(other)
    assert release.interpreter("3.99") == ""  # as pyenv's stand-in for one that is not installed
    assert release.interpreter(here)


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("setuptools.__version__ = '65.5.0'", "setuptools 65.5.0 is too old: `pip install .` "),
        ("sysconfig.get_path = lambda *_: '/none'", "there is no cmake, no ninja: `pip install .`"),
        ("importlib.util.find_spec = lambda _: None", "there is no pybind11: `pip install .` "),
        ("shutil.which = lambda name, **_: 'ninja' in name or 'cmake' in name", "no C++ compiler"),
    ],
)
def test_setup_names_a_missing_tool_in_one_line(lacks, says):
    modules = "importlib.util, runpy, shutil, sys, sysconfig, setuptools"
    code = f"import {modules}; {lacks}; runpy.run_path('setup.py')"
    command = [sys.executable, "-c", code, "build_ext", "--inplace"]
    environment = {"PATH": "/none", "PYCOMM_BUILD": "BINDING"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


NINJA = """[1/9] Building CXX object a.o
FAILED: b.o
c++ -O3 -Werror=all -c b.cpp
In file included from b.cpp:1:
b.h:7:3: error: 'x' was not declared in this scope
    7 |   x;
      |   ^
ninja: build stopped: subcommand failed.
"""


def test_setup_shows_the_first_errors_of_a_compiler(tmp_path):
    for name, text in (
        ("cmake", f"case $1 in --build) cat <<'END'\n{NINJA}END\nexit 1;; esac"),
        ("ninja", ""),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYCOMM_BUILD": "BINDING"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == "b.h:7:3: error: 'x' was not declared in this scope"
    assert "cmake --build" in last
    assert "failed" in last
    assert "Traceback" not in done.stderr


# ----------------------------------------------------------------------------------------- exports
# Binaries export pycomm's own names alone, so that they load beside any torch: a symbol of the C++
# library that one of them exports takes the place of the same symbol in the libraries that are
# loaded later. Names are read from .dynsym, as the loader does.


PACKAGE = Path(pycomm.__file__).parent
# Functions and variables of namespace pycomm; type info, vtables, guards of statics and thunks.
OWN = re.compile(r"_Z(T[ISVT]|GVZ?|Thn\d+_|Z)?NK?6pycomm")


def exported(binary: Path) -> list[str]:
    """Return the names that a library offers to others."""
    command = ["nm", "--dynamic", "--defined-only", "--extern-only", "--format=posix", binary]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def test_the_library_exports_pycomms_names_alone():
    names = exported(PACKAGE / "libpycomm.so")
    assert [name for name in names if not OWN.match(name)] == []
    assert "_ZTIN6pycomm8PeerLostE" in names


def test_modules_export_their_entry_point_alone():
    torch_module = _build.load_c10d().__file__
    assert torch_module is not None
    assert exported(Path(_C.__file__)) == ["PyInit__C"]
    for binary in (Path(torch_module), *PACKAGE.glob(f"_prebuilt/*/{_build.BINARY}")):
        assert exported(binary) == ["PyInit__c10d"]


@pytest.mark.parametrize(
    ("flag", "refused"), [("-static-libgcc", True), ("-static-libstdc++", False)]
)
def test_configure_refuses_an_unwinder_of_its_own(flag, refused, tmp_path):
    cmake = _build._tool("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    library = PACKAGE / "libpycomm.so"
    options = [
        f"-DPYCOMM_LIBRARY={library}",
        "-DPYCOMM_TORCH=OFF",
        f"-DCMAKE_SHARED_LINKER_FLAGS={flag}",
    ]
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == refused, done.stdout + done.stderr
    assert ("remove -static-libgcc" in done.stderr) == refused
