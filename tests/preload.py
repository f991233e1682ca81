"""Libraries that stand for another kernel: preloaded, they answer some of its calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def library(source: str, folder: Path) -> str:
    """Compile C source to a library for LD_PRELOAD; skip the test where no compiler is."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "kernel.c").write_text(source)
    made = folder / "kernel.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, folder / "kernel.c"], check=True)
    return str(made)
