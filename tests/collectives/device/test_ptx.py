"""GPU code of the collectives, compiled without a GPU: exact, without spills, with 16-byte
accesses, and with system scope for synchronization between ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pycomm.codecs.cuda.sources import include_folder
from tests.codecs.cuda.ptx import ARCHS, inexact, instructions
from tests.extent import part

pytestmark = pytest.mark.timeout(600)

# The number of kernels, and the GPUs: the build compiles all for all, which takes minutes.
SOURCES = {
    "move": (3, ARCHS),
    "reduce_small_float": (4, (80,)),
    "reduce_float": (4, tuple(arch for arch in ARCHS if arch != 80)),
    "reduce_integer": (8, (90,)),
}
COMPILED = part([*SOURCES], 4)
every_source = pytest.mark.parametrize("name", COMPILED)
WIDE = re.compile(r"\b(ld|st)(?:\.global)?(?:\.cs)?\.v(?:2\.[bu]64|4\.[bfu]32|2\.f64)")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc to compile csrc/collectives/device/*.cu")
    folder = tmp_path_factory.mktemp("nvcc")
    for name in COMPILED:
        archs = SOURCES[name][1]
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        file = include_folder() / "collectives/device" / f"{name}.cu"
        done = subprocess.run(
            [
                *(nvcc, "-std=c++17", "-O3", "-fmad=false", f"-I{include_folder()}", *targets),
                *("-Xptxas=-v", "--keep", "--keep-dir", folder, "-c", file),
                *("-o", folder / f"{name}.o"),
            ],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        (folder / f"{name}.log").write_text(done.stdout)
    return folder


def ptx(folder: Path, name: str) -> list[str]:
    files = sorted(folder.glob(f"{name}*.ptx"))
    assert len(files) == len(SOURCES[name][1]), name
    return [file.read_text() for file in files]


def test_every_source_is_here():
    files = (include_folder() / "collectives/device").glob("*.cu")
    assert {file.stem for file in files} == set(SOURCES)


@every_source
def test_kernels_are_exact(compiled, name):
    for text in ptx(compiled, name):
        assert inexact(text) == []
        assert text.count(".entry") == SOURCES[name][0]


@every_source
def test_kernels_spill_no_register(compiled, name):
    log = (compiled / f"{name}.log").read_text()
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)
    assert len(spilled) == SOURCES[name][0] * len(SOURCES[name][1])
    assert set(spilled) == {("0", "0", "0")}


@every_source
def test_kernels_move_16_bytes_at_a_time(compiled, name):
    for text in ptx(compiled, name):
        assert {found.group(1) for found in WIDE.finditer(text)} == {"ld", "st"}


@every_source
def test_peers_writes_are_ordered_and_uncached(compiled, name):
    for text in ptx(compiled, name):
        words = instructions(text)
        assert not [word for word in words if word.startswith("ld.global.nc")]
        assert "ld.acquire.sys.global.u64" in words
        assert "st.release.sys.global.u64" in words
