"""Compiles libpycomm.so with the CUDA kernels for all GPUs, into a wheel for every Python.

nvcc of CUDA 13 must be on the PATH, or named by CUDACXX. The version is pycomm's.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent.absolute()
ROOT = HERE.parent.parent
SHARED = runpy.run_path(str(ROOT / "pycomm/_cuda_wheel.py"))
found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert found is not None
VERSION = found[1]


class Build(build_py):
    """Adds the library, and the hash of the headers that it is made from."""

    def run(self) -> None:
        super().run()
        build, to = ROOT / "build/cuda13", Path(self.build_lib, "pycomm_cuda13").absolute()
        options = ["-DPYCOMM_CUDA=ON", "-DPYCOMM_TORCH=OFF"]
        python = f"-DPython_EXECUTABLE={sys.executable}"
        self.cmake("-S", ROOT, "-B", build, "-G", "Ninja", python, *options)
        self.cmake("--build", build, "--target", "pycomm")
        self.copy_file(str(build / "libpycomm.so"), str(to))
        (to / SHARED["STAMP"]).write_text(SHARED["hash_of_headers"](ROOT / "csrc"))

    def cmake(self, *arguments: object) -> None:
        scripts = sysconfig.get_path("scripts")
        env = os.environ | {"PATH": os.pathsep.join([scripts, os.environ["PATH"]])}
        cmake = shutil.which("cmake", path=env["PATH"])
        if cmake is None:
            raise SystemExit("pycomm-cuda13: there is no cmake: pip install cmake ninja")
        subprocess.run([cmake, *map(str, arguments)], check=True, env=env)


class Binary(Distribution):
    """Has a library, which setuptools knows nothing of."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """For one kind of processor and every Python, of which the library knows nothing."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    version=VERSION,
    distclass=Binary,
    install_requires=[f"pycomm=={VERSION}"],
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
)
