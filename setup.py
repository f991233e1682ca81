"""Build script: runs CMake with Ninja and puts the binaries in the package.

PYCOMM_CUDA (AUTO, ON, OFF), PYCOMM_CUDA_ARCH, PYCOMM_TORCH, PYCOMM_TORCHES and PYCOMM_SANITIZE
are passed on to CMake. All flags are in CMakeLists.txt. With PYCOMM_BUILD=OFF nothing is compiled:
the Makefile installs the package in place while another process compiles it. With BINDING only what
needs no torch and takes longest is compiled, and nothing is installed. PYCOMM_TEST_BINDING=ON also
builds what only tests call, as a build in place does.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TextIO

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
OLDEST_SETUPTOOLS = 77  # the first that reads the licence in pyproject.toml
ERROR_LINES = 20
PIP = (
    "`pip install .` brings what the build needs; before `pip install --no-build-isolation .` run "
    'pip install "setuptools>=77" pybind11 cmake ninja'
)
# Top-level folders that install inside the package; on their own these names are other projects'.
INSIDE = {"pycomm.bench": "bench", "pycomm.triton_kernels": "triton_kernels"}
PARTS = [f"{inside}.{part}" for inside, folder in INSIDE.items() for part in find_packages(folder)]
CUDA_WHEEL = runpy.run_path(str(ROOT / "pycomm/_cuda_wheel.py"))
TESTS = "PYCOMM_TEST_BINDING"
OPTIONS = ("PYCOMM_CUDA", "PYCOMM_CUDA_ARCH", "PYCOMM_TORCH", "PYCOMM_TORCHES", "PYCOMM_SANITIZE")


def stop(what: str, cure: str = PIP) -> None:
    """End the installation with one line."""
    raise SystemExit(f"pycomm: {what}: {cure}")


class CMakeBuild(build_ext):
    """An incremental build, in a folder for each interpreter and set of options."""

    def run(self) -> None:
        wanted = os.environ.get("PYCOMM_BUILD")
        if wanted == "OFF":
            return
        self.require_tools()
        in_place = self.inplace or self.editable_mode
        package = ROOT / "pycomm" if in_place else Path(self.build_lib).absolute() / "pycomm"
        chosen = {name: os.environ[name] for name in OPTIONS if os.environ.get(name)}
        chosen = self.for_these_gpus() | chosen
        parts = [str(sys.implementation.cache_tag), *chosen.values()]
        build = ROOT / "build" / "-".join(parts).replace(os.sep, "_")
        tests = (in_place or os.environ.get(TESTS)) and (ROOT / "tests/binding").is_dir()
        chosen["PYCOMM_TESTS"] = "ON" if tests else "OFF"
        self.cmake(
            "-S", ROOT, "-B", build, *self.tools(), *(f"-D{k}={v}" for k, v in chosen.items())
        )
        if wanted == "BINDING":
            self.cmake("--build", build, "--target", "binding")
            return
        self.cmake("--build", build, "--parallel")
        for component in ["binaries"] if in_place else ["binaries", "sources"]:
            self.cmake("--install", build, "--prefix", package, "--component", component)
        (package / CUDA_WHEEL["STAMP"]).write_text(CUDA_WHEEL["hash_of_headers"](ROOT / "csrc"))

    def for_these_gpus(self) -> dict[str, str]:
        """Return the defaults of options: kernels take minutes, so only for GPUs that are here."""
        if any(os.environ.get(name) for name in ("PYCOMM_CUDA", "PYCOMM_CUDA_ARCH")):
            return {}
        if Path("/dev/nvidiactl").exists():
            print("pycomm: CUDA kernels are compiled for the GPUs of this machine, if nvcc works")
            return {"PYCOMM_CUDA_ARCH": "local"}
        print("pycomm: no GPU here, so no CUDA kernels; PYCOMM_CUDA=ON compiles them for all")
        return {"PYCOMM_CUDA": "OFF"}

    def tools(self) -> list[str]:
        """Return CMake's options for its tools, whose paths differ in each isolated build."""
        ninja = f"-DCMAKE_MAKE_PROGRAM={self.find('ninja')}"
        return [f"-DPython_EXECUTABLE={sys.executable}", "-GNinja", ninja]

    def require_tools(self) -> None:
        """End with one line if something that the build needs is not here."""
        packages = [name for name in ("cmake", "ninja") if self.find(name) is None]
        if importlib.util.find_spec("pybind11") is None:
            packages.insert(0, "pybind11")
        if packages:
            stop(f"there is no {', no '.join(packages)}")
        names = os.environ.get("CXX", "").split()[-1:] or ["c++", "g++", "clang++"]
        if not any(map(shutil.which, names)):
            stop(f"there is no C++ compiler ({', '.join(names)})", "on Debian: apt install g++")

    def find(self, program: str) -> str | None:
        """Return a program's path: on the PATH, or next to the interpreter, where pip puts it."""
        return shutil.which(program) or shutil.which(program, path=sysconfig.get_path("scripts"))

    def cmake(self, *arguments: object) -> None:
        command = [str(self.find("cmake")), *map(str, arguments)]
        if self.verbose >= 1:
            subprocess.run(command, check=True)
            return
        said = []
        with (
            progress() as line,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running,
        ):
            assert running.stdout is not None
            for raw in running.stdout:
                said.append(raw.decode(errors="replace").rstrip())
                if "--build" in arguments:
                    line.write(f"\r\033[K{said[-1][: shutil.get_terminal_size().columns - 1]}")
                    line.flush()
            if "--build" in arguments:
                line.write("\r\033[K")
        if running.returncode != 0:
            print(*first_errors(said), sep="\n", file=sys.stderr)
            stop(f"{' '.join(command[:3])} failed", "`python setup.py -v build_ext` shows all")

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def first_errors(said: list[str]) -> list[str]:
    """Return what a compiler, a linker or CMake says of its first errors, or the last lines."""
    about = re.compile(r"(error|undefined reference)\b.*:|: undefined |^CMake Error", re.IGNORECASE)
    first = next((i for i, line in enumerate(said) if about.search(line)), -ERROR_LINES)
    return said[first:][:ERROR_LINES]


def progress() -> TextIO:
    """Return where a line shows the progress: the terminal, even if pip takes the output."""
    try:
        return open("/dev/tty", "w")
    except OSError:
        return open(os.devnull, "w")


if int(setuptools.__version__.partition(".")[0]) < OLDEST_SETUPTOOLS:
    stop(f"setuptools {setuptools.__version__} is too old")
setup(
    packages=[*find_packages(include=["pycomm", "pycomm.*"]), *INSIDE, *PARTS],
    package_dir=INSIDE,
    ext_modules=[Extension("pycomm._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
