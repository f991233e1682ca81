"""Staged copy of the tree, in which mutants are built and run: the sources stay clean.

Tests run there with a limit, and leave no process behind.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pycomm.bench.lab import subreaper
from tests.mutants.catalogue import Mutant

ROOT = Path(__file__).parents[2]
STAMPS = ("_c10d.torch", "libpycomm.headers")  # they say what the binaries were built of
PACKAGES = {"pycomm/bench": "bench", "pycomm/triton_kernels": "triton_kernels"}


class BuildFailed(Exception):
    """The copy does not compile; the text has the compiler's words."""


class Staged:
    """A copy of all files that git does not ignore."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def update(self, *, compiled: bool) -> None:
        """Bring the copy up to date. Files that have not changed are left alone.

        Args:
            compiled: build the copy's own binaries, instead of taking those of the tree.

        Raises:
            BuildFailed: the sources do not compile, or Python finds a part elsewhere.
        """
        names = _names()
        for name in names:
            write(self.folder / name, (ROOT / name).read_bytes())
        for link, target in PACKAGES.items():
            if not (self.folder / link).is_symlink():
                (self.folder / link).symlink_to(self.folder / target)
        listed = self.folder / "build" / "files"
        for gone in set(listed.read_text().splitlines() if listed.exists() else ()) - set(names):
            (self.folder / gone).unlink(missing_ok=True)
        write(listed, "\n".join(names).encode())
        if compiled:
            self.build()
        else:
            for file in [*ROOT.glob("pycomm/*.so"), *(ROOT / "pycomm" / name for name in STAMPS)]:
                shutil.copy2(file, self.folder / "pycomm" / file.name)
        self._check()

    def build(self) -> None:
        """Compile what has changed.

        Raises:
            BuildFailed: the sources do not compile.
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

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Make the mutant's change, and compile it if it is one of C++; undo it in the end.

        Raises:
            BuildFailed: the mutant does not compile.
        """
        path = self.folder / mutant.file
        before = path.read_bytes()
        try:
            _rewrite(path, mutant.applied(before.decode()).encode())
            if mutant.compiled:
                self.build()
            yield
        finally:
            _rewrite(path, before)
            if mutant.compiled:
                self.build()  # from the compiler's cache, where there is one

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        """Return the environment of processes that use the copy."""
        return {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", **more}

    def _check(self) -> None:
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


def _names() -> Sequence[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in found.splitlines() if (ROOT / name).is_file()})


def write(path: Path, data: bytes) -> None:
    """Write a file, unless it is so already: what is made of it stays then."""
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _rewrite(path: Path, data: bytes) -> None:
    """Write a file, and forget its bytecode: that is compared by seconds and size alone."""
    path.write_bytes(data)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path.resolve()))).unlink(missing_ok=True)


# ------------------------------------------------------------------ running tests in it

Outcome = Literal["passed", "failed", "hung", "nothing"]
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # exit statuses of pytest


@dataclass(frozen=True)
class Ran:
    """What tests have said."""

    outcome: Outcome
    seconds: float
    by: str
    """The first test that failed."""
    output: str


def run(staged: Staged, tests: Iterable[str], limit: float) -> Ran:
    """Run tests in the copy, as it is, until the first fails."""
    with tempfile.TemporaryDirectory(prefix="pycomm-mutant-") as folder:
        log = Path(folder) / "log"
        # All processes of the run end with it, those that have left its session, too.
        command = [sys.executable, "-I", "-S", subreaper.__file__, str(os.getpid())]
        command += [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        begin = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=staged.folder,
                env=staged.environment({"TMPDIR": folder}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.send_signal(signal.SIGHUP)
                process.wait()
        seconds = time.monotonic() - begin
        output = log.read_text(errors="replace")
        return Ran(_outcome(status, output), seconds, _by(output), output)


def _outcome(status: int | None, output: str) -> Outcome:
    if status is None:
        return "hung"
    if status == PASSED:
        # All tests were left out: nothing was shown.
        return "passed" if re.search(r"\b[1-9]\d* passed", output) else "nothing"
    # A process that crashed has failed, too.
    return "failed" if status in (FAILED, INTERRUPTED) or status > 5 else "nothing"


def _by(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1] if found else ""
