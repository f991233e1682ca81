"""Other processors make the same bytes: older x86-64 under an emulator, and aarch64.

The emulated processors run this build's libpycomm, and so the loops that it has for them. The
driver for aarch64 is compiled by `make portable`, which takes minutes; then it runs here, too.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import pycomm
from pycomm import _C
from pycomm.codecs import CODECS
from tests.codecs.test_golden import all_entries, golden
from tests.collectives.ways import REDUCIBLE, folded
from tests.compiling import ROOT, compile_cpp
from tests.portable.__main__ import AARCH64, RANK_AARCH64

LIBRARY = ROOT / "pycomm"
# Processors without AVX (2008), with AVX2 but without AVX-512 (2013), and the level that they have.
EMULATED = {"Nehalem": "default", "Haswell": "x86-64-v3"}
SMALL_FLOATS = {"float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1}
FLOATS = {"float32": 4, "float64": 8, "complex64": 8, **SMALL_FLOATS}
INTEGERS = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint64": 8}


def compiled(name: str, folder: Path) -> Path:
    """Compile a program of this folder against libpycomm."""
    binary, source = folder / name, Path(__file__).parent / f"{name}.cpp"
    link = (LIBRARY / "libpycomm.so", f"-Wl,-rpath,{LIBRARY}")
    compile_cpp(source, binary, "-std=gnu++17", "-O1", f"-I{ROOT / 'csrc'}", link=link)
    return binary


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: apt-get install qemu-user")
    return found


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return compiled("driver", tmp_path_factory.mktemp("portable"))


@pytest.fixture(params=["native", *EMULATED, "aarch64"])
def processor(request):
    """Return the name of a processor, and the command that runs the driver on it."""
    name = request.param
    if name == "aarch64":
        if not AARCH64.exists():
            pytest.skip("make portable compiles for aarch64, and needs qemu-user")
        return name, [emulator("qemu-aarch64"), str(AARCH64)]
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    binary = str(request.getfixturevalue("driver"))
    if name == "native":
        return name, [binary]
    return name, [emulator("qemu-x86_64"), "-cpu", name, binary]


def answer(processor, request: bytes) -> bytes:
    """Run the driver."""
    _, command = processor
    done = subprocess.run(command, input=request, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_the_emulated_processor_lacks_what_its_name_says(processor):
    level = answer(processor, b"simd").decode()
    assert level == EMULATED.get(processor[0], level)


@cache
def coded() -> tuple[bytes, list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]]:
    """Return the requests for all golden vectors, and what each must answer."""
    request, wanted = b"", []
    for spec, case in all_entries():
        codec = pycomm.codec(spec)
        file = golden(codec.name)
        x, residual = file[f"{case}/x"], file[f"{case}/residual"]
        text = codec.spec().encode()
        request += b"code" + struct.pack("<Q", len(text)) + text
        request += struct.pack("<QQ", x.size, 5 * codec.granule)
        request += x.tobytes() + residual.tobytes()
        parts = (file[f"{spec}/{case}/{part}"] for part in ("payload", "new_residual", "decoded"))
        wanted.append((f"{spec} {case}", *parts))
    return request, wanted


def test_codecs_write_the_golden_bytes(processor):
    request, wanted = coded()
    got = answer(processor, request)
    at, wrong = 0, []
    for name, *parts in wanted:
        for part in parts:
            found = np.frombuffer(got, part.dtype, part.size, at).copy()
            at += part.nbytes
            if part.dtype == np.float32:
                found[np.isnan(found)] = np.nan  # bits of NaN results are not promised
            if found.tobytes() != part.tobytes():
                wrong.append(name)
    assert at == len(got)
    assert wrong == []
    assert {pycomm.codec(spec).name for spec, _ in all_entries()} == set(CODECS)


def numbers(dtype: str, count: int, seed: int) -> np.ndarray:
    """Return bytes of finite numbers of a dtype: floats have no top bit of the exponent."""
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype in FLOATS:
        width = 4 if dtype == "complex64" else FLOATS[dtype]
        raw[width - 1 :: width] &= 0xBF
    return raw


def test_reductions_and_checksums_have_the_same_bits(processor):
    request, wanted = b"", b""
    for core, how in REDUCIBLE:
        if core.name not in FLOATS | INTEGERS or how.name in ("bor", "premul_sum"):
            continue
        numel, size = 1003, (FLOATS | INTEGERS)[core.name]
        inputs = [numbers(core.name, numel * size, seed) for seed in range(3)]
        out = folded(core, how, inputs)
        request += b"fold" + struct.pack("<QQQQ", core.value, how.value, len(inputs), numel)
        for values in inputs:
            request += values.tobytes()
        wanted += out.tobytes()
        wanted += struct.pack("<3I", *(_C.crc32c(values.tobytes()) for values in inputs))
    assert answer(processor, request) == wanted


# ------------------------------------------------------------------------------------------- groups
# Ranks on different processors in one group: equal bits on all, and those of a group of one kind.
#
# The processors are emulated (qemu-user), and each rank is a process of its own that talks TCP; the
# library is the real one. The rank for aarch64 is compiled by `make portable`.


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
