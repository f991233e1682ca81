"""The wheel pycomm-cuda13: its library takes the place of the package's own if it fits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycomm
from pycomm import _build, _cuda_wheel

PACKAGE = Path(pycomm.__file__).parent
LOADED = """
import warnings
warnings.simplefilter("always")
from pycomm import _C
with open("/proc/self/maps") as maps:
    print(*{line.split()[-1] for line in maps if "libpycomm" in line})
"""


@pytest.fixture
def wheel(tmp_path):
    """Install a wheel whose library is the package's own; return its folder."""
    folder = tmp_path / "pycomm_cuda13"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("libpycomm.so", _cuda_wheel.STAMP):
        shutil.copy(PACKAGE / name, folder)
    return folder


def loaded(wheel: Path) -> tuple[str, str]:
    """Return which libraries a process has loaded that imports pycomm, and what it says."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel.parent), str(PACKAGE.parent)])}
    done = subprocess.run([sys.executable, "-c", LOADED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_its_library_is_the_only_one(wheel):
    assert loaded(wheel) == (str(wheel / "libpycomm.so"), "")


@pytest.mark.parametrize("change", ["other headers", "no stamp", "cut short"])
def test_one_that_does_not_fit_is_left_with_a_warning(wheel, change):
    if change == "other headers":
        (wheel / _cuda_wheel.STAMP).write_text("of last year")
    elif change == "no stamp":
        (wheel / _cuda_wheel.STAMP).unlink()
    else:
        (wheel / "libpycomm.so").write_bytes((wheel / "libpycomm.so").read_bytes()[:40])
    library, said = loaded(wheel)
    assert library == str(PACKAGE / "libpycomm.so")
    assert "RuntimeWarning: pycomm-cuda13 is installed and not used: it " in said


@pytest.mark.parametrize(("driver", "why"), [(12080, "CUDA 12.8"), (13000, ""), (None, "")])
def test_cuda_runtime_checks_the_driver(wheel, monkeypatch, driver, why):
    monkeypatch.setattr(_cuda_wheel, "driver_version", lambda: driver)
    said = _cuda_wheel.why_not(wheel)
    assert why in said
    assert bool(said) == bool(why)


def test_the_stamp_tells_of_every_header(tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(_build.source_root() / "csrc", csrc)
    before = _cuda_wheel.hash_of_headers(csrc)
    assert before == (PACKAGE / _cuda_wheel.STAMP).read_text()
    header = csrc / "transports/tcp/stream.h"
    header.write_text(header.read_text() + " ")
    assert _cuda_wheel.hash_of_headers(csrc) != before
