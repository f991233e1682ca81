"""Ranks on different processors in one group: equal bits on all, and those of a group of one kind.

The processors are emulated (qemu-user), and each rank is a process of its own that talks TCP; the
library is the real one. The rank for aarch64 is compiled by `make portable`.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from tests.portable.__main__ import RANK_AARCH64
from tests.portable.test_other_processors import compiled, emulator

LIMIT = 100  # seconds of a group


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    if platform.machine() != "x86_64":
        pytest.skip("this needs x86-64")
    return compiled("rank", tmp_path_factory.mktemp("mixed"))


def lines_of(commands: list[list[str]], folder: Path) -> list[list[str]]:
    """Run a group with a command for each rank; return the lines that each rank writes."""
    store = folder / "store"
    store.mkdir()
    ranks = []
    try:
        for number, command in enumerate(commands):
            words = [*command, str(store), str(number), str(len(commands))]
            ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        answers = [process.communicate(timeout=LIMIT) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors.decode()
    return [text.decode().splitlines() for text, _ in answers]


def results(lines: list[str]) -> list[str]:
    """The results alone, which all ranks share; residuals are each rank's own."""
    return [line.partition(" residual ")[0] for line in lines]


def with_older(rank: Path) -> list[list[str]]:
    x86 = emulator("qemu-x86_64")
    # As fast as this machine can, with AVX2 alone, and without AVX.
    return [[str(rank)], [x86, "-cpu", "Haswell", str(rank)], [x86, "-cpu", "Nehalem", str(rank)]]


def test_ranks_of_any_simd_level_have_equal_bits(rank, tmp_path):
    alike = tmp_path / "alike"
    alike.mkdir()
    expected = lines_of([[str(rank)]] * 3, alike)
    found = lines_of(with_older(rank), tmp_path)
    assert len(expected[0]) == 14
    assert len({tuple(results(lines)) for lines in found}) == 1
    assert found == expected


def test_ranks_on_x86_and_aarch64_have_equal_bits(rank, tmp_path):
    if not RANK_AARCH64.exists():
        pytest.skip("make portable compiles for aarch64, and needs qemu-user")
    arm = [emulator("qemu-aarch64"), str(RANK_AARCH64)]
    alike = tmp_path / "alike"
    alike.mkdir()
    expected = lines_of([[str(rank)]] * 4, alike)
    found = lines_of([arm, *with_older(rank)[:2], arm], tmp_path)
    assert len({tuple(results(lines)) for lines in found}) == 1
    assert found == expected
