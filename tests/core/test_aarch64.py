"""The core, compiled for AArch64 and run by qemu, gives the bits of this machine."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pycomm import _C
from tests.collectives.ways import folded
from tests.core.test_arithmetic import CANONICAL, ops, special

ROOT = Path(__file__).parents[2]
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
CORE = ["crc32c", "float16", "op", "reduce", "reduce_float", "reduce_integer", "reduce_small_float"]
# Of the register FPCR: flush denormals; round toward plus and minus infinity, and toward zero.
SETTINGS = [0, 1 << 24, 1 << 22, 2 << 22, 3 << 22]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    if not (shutil.which(COMPILER) and shutil.which(QEMU)):
        pytest.skip("there is no g++ for AArch64, or no qemu that runs what it makes")
    path = tmp_path_factory.mktemp("aarch64") / "core"
    flags = ["-std=c++17", "-O3", "-static", "-ffp-contract=off", "-fno-math-errno"]
    flags += ["-fno-trapping-math", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    sources = [str(ROOT / "csrc/core" / f"{name}.cpp") for name in CORE]
    subprocess.run(
        [COMPILER, *flags, *sources, str(Path(__file__).with_name("aarch64_main.cpp")), "-o", path],
        check=True,
    )
    return path


@pytest.mark.parametrize("processor", ["max", "cortex-a53"])
def test_crc_instructions_give_the_tables_checksums(program, processor):
    done = subprocess.run(
        [QEMU, "-cpu", processor, program, "checksums"], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert done.stdout.split() == ["streams", "instruction", "table"]


def test_reductions_ignore_the_threads_settings(program):
    """Any values, with NaNs, Infs and denormals, at sizes with and without a rest."""
    jobs, want = [], []
    for dtype in CANONICAL:
        kind = _C.DType.__members__[dtype]
        for i, op in enumerate(ops(dtype)):
            reduction = _C.ReduceOp.__members__[op]
            for numel in (7, 1027):
                inputs = [special(10 * i + r, dtype, numel) for r in range(3)]
                for x in inputs:
                    x[: numel // 3] >>= np.array(8 * x.itemsize - 4, x.dtype)  # tiny values
                if op == "premul_sum":
                    out = np.zeros_like(inputs[0])
                    _C.scale(kind, inputs[0].ctypes.data, out.ctypes.data, numel, 0.3)
                else:
                    out = folded(kind, reduction, inputs)
                for fpcr in SETTINGS:
                    head = struct.pack("<iiiiQ", kind.value, reduction.value, 3, numel, fpcr)
                    jobs.append(head + b"".join(x.tobytes() for x in inputs))
                    want.append((dtype, op, numel, fpcr, out.tobytes()))
    done = subprocess.run(
        [QEMU, program, "reductions"], input=b"".join(jobs), stdout=subprocess.PIPE
    )
    assert done.returncode == 0
    at = 0
    for *what, bits in want:
        assert done.stdout[at : at + len(bits)] == bits, what
        at += len(bits)
    assert at == len(done.stdout)
