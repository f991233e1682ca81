"""GPU code of the collectives, compiled without a GPU: exact, without spills, with 16-byte
accesses, and with system scope for synchronization between ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pycomm.codecs.cuda.sources import include_folder
from tests.codecs.cuda.ptx import ARCHS, inexact, instructions, run_nvcc_and_keep, spilled
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
    folder = tmp_path_factory.mktemp("nvcc")
    for name in COMPILED:
        file = include_folder() / "collectives/device" / f"{name}.cu"
        run_nvcc_and_keep(file, folder, SOURCES[name][1])
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
    number, archs = SOURCES[name]
    found = spilled((compiled / f"{name}.log").read_text())
    assert found == [("0", "0", "0")] * number * len(archs)


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
