"""Compiles C++ for tests. Some files take ten seconds, hence a cache, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "build" / "tests"
"""Folder of sources that tests write."""


def compile_cpp(
    source: Path, target: Path, *flags: str | Path, link: Sequence[str | Path] = ()
) -> None:
    """Compile a source to a program, or with ``link=["-shared"]`` to a library.

    Raises:
        pytest.skip.Exception: there is no C++ compiler.
        AssertionError: the compiler or the linker fails; with what it prints.
    """
    compiled = target.with_suffix(".o")
    compile_object(source, compiled, *flags)
    _run([compiler(), compiled, *link, "-o", target], ROOT)
    compiled.unlink()


def compile_object(source: Path, target: Path, *flags: str | Path, root: Path = ROOT) -> None:
    """Compile a source of a tree, as `compile_cpp` does.

    The cache knows files by their paths from ``root``, so that all clones share its objects.
    """
    cache = [program for program in [shutil.which("ccache")] if program]
    named = os.path.relpath(source, root) if source.is_relative_to(root) else source
    _run([*cache, compiler(), *flags, "-c", named, "-o", target], root)


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


def library(source: str, folder: Path) -> str:
    """Compile C source to a library for LD_PRELOAD; skip the test where no compiler is.

    It stands for another kernel, which answers some calls of a program.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "kernel.c").write_text(source)
    made = folder / "kernel.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, folder / "kernel.c"], check=True)
    return str(made)


def run_preloaded(program: str, kernel: str, folder: Path, *words: str, **variables: str) -> str:
    """Run a Python program on the `library` of a C source; return what it has printed."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        # Behind what is preloaded here: the runtime of a sanitizer comes first.
        env={
            **os.environ,
            "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library(kernel, folder)}",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _run(command: Sequence[str | Path], root: Path) -> None:
    done = subprocess.run(
        list(map(str, command)),
        cwd=root,
        env=os.environ | {"CCACHE_BASEDIR": str(root), "CCACHE_NOHASHDIR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
