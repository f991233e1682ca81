"""What a release contains, and that its workflows call what there is."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import setuptools
import yaml
from setuptools.config.pyprojecttoml import read_configuration

from release import torches

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
