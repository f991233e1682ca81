"""Ranks on different processors form one group, and get the bits that equal processors get.

Emulated: qemu runs a rank on an old processor, which has no AVX, or on one without AVX-512; each
rank counts as a host of its own, so they talk over TCP. The code that runs is the installed one,
which chooses its vector instructions by the processor.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycomm
from pycomm import _C

ROOT = Path(__file__).parents[2]
QEMU = "qemu-x86_64"
# By the level that the core names: the emulated processor; None: this one.
LEVELS = {_C.simd_level(): None, "x86-64-v3": "Haswell", "default": "Nehalem"}
CODECS = [
    "int4",
    "int8:rounding=stochastic",
    "bf16",
    "fp8",
    "mxfp4",
    "sign",
    "eden:bits=2,size=128",
    "topk:0.05,values=int8",
    "lossless",
]

RANK = """
import array, hashlib, random, sys
from pycomm import _C
from pycomm.communicator import Communicator, Store
from pycomm.pieces import Piece
rank, size, folder, *codecs = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
numel = 2003
with Communicator(Store.file(folder), rank, size, transport="tcp", timeout=100) as c:
    print("level", _C.simd_level())
    def values(seed):
        numbers = random.Random(100 * seed + rank)
        found = array.array("f", (numbers.gauss(0, 10 ** (i % 7 - 3)) for i in range(numel)))
        found[:6] = array.array("f", [0.0, -0.0, 1e-40, -3e-45, 3e38 / size, 65504.0])
        return found
    def digest(numbers):  # of NaNs, only that they are some: their bits follow no rule
        nan = numbers.typecode == "f" and float("nan")
        plain = (nan if v != v else v for v in numbers)
        return hashlib.sha256(array.array(numbers.typecode, plain))
    integers = array.array("i", (rank * 7 - i for i in range(numel)))
    for x in (values(0), integers):
        c.all_reduce(x)
        print(x.typecode, digest(x).hexdigest())
    for spec in codecs:
        residual, owner = array.array("f", bytes(4 * numel)), array.array("f", bytes(4 * numel))
        fed = {"residual": residual, "owner_residual": owner}
        codec = _C.Codec(spec)
        together = hashlib.sha256()
        for step in range(2):
            x = values(1 + step)
            piece = Piece(numel, codec, **(fed if "lossless" not in spec else {}))
            c.all_reduce_coded(x, [piece], seed=5, step=step)
            together.update(digest(x).digest())
        print(spec, together.hexdigest())
rows, columns = 37, 53
def same(seed, count):
    numbers = random.Random(seed)
    return array.array("f", (numbers.gauss(0, 1) for _ in range(count)))
def at(numbers):
    return numbers.buffer_info()[0]
g, m, x = (same(seed, rows * columns) for seed in range(3))
made = [same(seed, rows + columns) for seed in range(3, 7)]
row, column, r, c = made = [array.array("f", map(abs, numbers)) for numbers in made]
by, sums = (rows, columns, at(row), at(column)), (at(r), rows, at(c), columns, 0.9)
_C.factored_moments_divide(at(g), *by, at(m), rows - 1, 0.7, 2.0, at(r), at(c), 0.5, 1.0, 1)
_C.factored_moments_multiply(at(g), *by, 1.5, 1)
_C.factored_moments_factors(*sums, 0.1, at(row), at(column))
_C.factored_moments_move(at(x), *by, at(g), at(m), 0.1, 0.9, 3.0, 1)
_C.factored_moments_reciprocal_factors(*sums, rows, 0.01, 0.1, at(row), at(column))
errors = _C.factored_moments_errors(at(g), at(x), False, rows * columns)
print("scaled", *(digest(v).hexdigest() for v in (g, m, x, *made)), errors)
"""


def run(processors: list[str | None], folder: Path) -> list[list[str]]:
    """Run a rank on each processor, and return the lines of each."""
    specs = [pycomm.codec(text).spec() for text in CODECS]
    ranks = []
    for rank, processor in enumerate(processors):
        emulate = [QEMU, "-cpu", processor] if processor else []
        # A virtual environment's python links to the one that qemu can load.
        command = [*emulate, sys.executable, "-c", RANK, str(rank), str(len(processors))]
        ranks.append(
            subprocess.Popen(
                [*command, str(folder), *specs],
                env=os.environ | {"PYCOMM_HOST_ID": f"host{rank}", "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    return [text.splitlines() for text, _ in outputs]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this is no x86 processor")
@pytest.mark.skipif(not shutil.which(QEMU), reason=f"no {QEMU} (apt-get install qemu-user)")
def test_ranks_with_and_without_vector_instructions_get_the_same_bits(tmp_path):
    alike = run([None] * len(LEVELS), tmp_path / "alike")
    unlike = run(list(LEVELS.values()), tmp_path / "unlike")
    assert [lines[0] for lines in unlike] == [f"level {level}" for level in LEVELS]
    assert len(alike[0]) == 4 + len(CODECS)
    for lines in (*alike, *unlike):
        assert lines[1:] == alike[0][1:]
