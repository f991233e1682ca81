"""Compiles C++ for tests. Some files take ten seconds, hence a cache, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "build" / "tests"
"""Folder of sources that tests write."""


def compile_cpp(
    source: Path, target: Path, *flags: str | Path, link: Sequence[str | Path] = ()
) -> None:
    """Compile a source of this checkout to a program, or with ``link=["-shared"]`` to a library.

    The cache knows files by their paths from the checkout, so that all clones share its objects.

    Raises:
        pytest.skip.Exception: there is no C++ compiler.
        AssertionError: the compiler or the linker fails; with what it prints.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    cache = [program for program in [shutil.which("ccache")] if program]
    compiled = target.with_suffix(".o")
    named = os.path.relpath(source, ROOT) if source.is_relative_to(ROOT) else source
    for command in (
        [*cache, compiler, *flags, "-c", named, "-o", compiled],
        [compiler, compiled, *link, "-o", target],
    ):
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=os.environ | {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    compiled.unlink()
