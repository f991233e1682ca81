"""Staged copy of the tree, in which mutants are built and run: the sources stay clean."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.mutant import Mutant, instrumented

ROOT = Path(__file__).parents[2]
CHOICE = "MUTANT_OF_PYCOMM"  # the number of the mutant that is to run
REACHED = "MUTANT_REACHED_FILE"  # a file that appears when a mutant in C++ runs
HEADER = "build/mutants.h"
BUILD_FILE, LEVEL = "CMakeLists.txt", "-O1"  # compiles in half the time, to the same bits
PACKAGES = {"pycomm/bench": "bench", "pycomm/triton_kernels": "triton_kernels"}

# The environment is read once. An expression costs a load and a comparison.
HEADER_TEXT = f"""#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

namespace pycomm_mutants {{
inline uint32_t choice() {{
  const char* text = std::getenv("{CHOICE}");
  return text ? static_cast<uint32_t>(std::strtoul(text, nullptr, 10)) : 0;
}}
inline const uint32_t chosen = choice();
inline bool make_mark() {{
  const int error = errno;
  const char* file = std::getenv("{REACHED}");
  const int fd = file ? ::open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600) : -1;
  if (fd >= 0) ::close(fd);
  errno = error;
  return true;
}}
[[gnu::noinline, gnu::cold]] inline bool reach() {{
  static const bool marked = make_mark();
  return marked;
}}
}}  // namespace pycomm_mutants
#define PYCOMM_MUTANT(number) \\
  (__builtin_expect(pycomm_mutants::chosen == (number), 0) && pycomm_mutants::reach())
"""


class BuildFailed(Exception):
    """The mutants do not compile; the text has the compiler's words."""


class Staged:
    """One copy of all files that git does not ignore, with the mutants of C++ compiled in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def update(self, mutants: Iterable[Mutant]) -> None:
        """Bring the copy up to date. Files that have not changed are left alone: builds are
        incremental."""
        by_file: dict[str, list[Mutant]] = {}
        for mutant in mutants:
            if mutant.form != "text":
                by_file.setdefault(mutant.file, []).append(mutant)
        names = _names()
        for name in [name for name in names if name != BUILD_FILE]:
            data = (ROOT / name).read_bytes()
            if name in by_file:
                text = instrumented(data.decode(), by_file[name])
                data = f'#include "{self.folder / HEADER}"\n{text}'.encode()
            _write(self.folder / name, data)
        flags = (ROOT / BUILD_FILE).read_text().replace('"-O3"', f'"{LEVEL}"')
        _write(self.folder / BUILD_FILE, flags.encode())
        _write(self.folder / HEADER, HEADER_TEXT.encode())
        for link, target in PACKAGES.items():
            if not (self.folder / link).is_symlink():
                (self.folder / link).symlink_to(self.folder / target)
        listed = self.folder / "build" / "files"
        for gone in set(listed.read_text().splitlines() if listed.exists() else ()) - set(names):
            (self.folder / gone).unlink(missing_ok=True)
        _write(listed, "\n".join(names).encode())

    def build(self) -> None:
        """Compile the binaries beside the copy's package.

        Raises:
            BuildFailed: a mutant does not compile, or the sources do not.
        """
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environment = self.environment({"PYCOMM_CUDA": "OFF"})
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            errors = [line for line in lines if "error:" in line.lower()]
            raise BuildFailed("\n".join(errors[:20] or lines[-20:]))

    def take_binaries(self, tree: Path) -> None:
        """Copy the binaries of another tree that has the same sources of C++."""
        stamps = [tree / "pycomm" / name for name in ("_c10d.torch", "libpycomm.headers")]
        for file in [*tree.glob("pycomm/*.so"), *stamps]:
            shutil.copy2(file, self.folder / "pycomm" / file.name)

    def check(self) -> None:
        """Check that Python finds all parts of the package in the copy.

        Raises:
            BuildFailed: a part was found elsewhere.
        """
        modules = ("_C", "bench", "triton_kernels")
        code = "import pycomm\n" + "\n".join(
            f"import pycomm.{name}; print(pycomm.{name}.__file__)" for name in modules
        )
        found = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self.environment({}),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        if any(not path.startswith(f"{self.folder}{os.sep}") for path in found):
            raise BuildFailed(f"not all of the package is the copy's: {', '.join(found)}")

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        """Return the environment of processes that use the copy."""
        return {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", **more}

    @contextmanager
    def with_text_of(self, mutant: Mutant) -> Iterator[None]:
        """Change a file of the copy as the mutant says, for mutants that are not compiled in."""
        path = self.folder / mutant.file
        before = path.read_bytes()
        try:
            _rewrite(path, mutant.applied(before.decode()).encode())
            yield
        finally:
            _rewrite(path, before)


def _names() -> Sequence[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in found.splitlines() if (ROOT / name).is_file()})


def _write(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _rewrite(path: Path, data: bytes) -> None:
    """Write a file, and forget its bytecode: that is compared by seconds and size alone."""
    path.write_bytes(data)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path.resolve()))).unlink(missing_ok=True)
