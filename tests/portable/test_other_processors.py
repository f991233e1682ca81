"""Other processors make the same bytes: older x86-64 under an emulator, and aarch64.

The emulated processors run this build's libpycomm, and so the loops that it has for them. The
driver for aarch64 is compiled by `make portable`, which runs this file as a program. It takes
g++-aarch64-linux-gnu and qemu-user, and ten minutes at first; later only what has changed is
compiled again.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import pycomm
from pycomm import _C
from pycomm.codecs import CODECS
from tests.codecs.test_golden import all_entries, golden
from tests.collectives.ways import CANONICAL, REDUCIBLE, folded
from tests.compiling import ROOT, compile_cpp
from tests.core.test_arithmetic import special

LIBRARY = ROOT / "pycomm"
DRIVER = Path(__file__).parent / "driver.cpp"
FOLDER = ROOT / "build/portable"
AARCH64 = FOLDER / "driver-aarch64"
COMPILER = "aarch64-linux-gnu-g++"
# Processors without AVX (2008), with AVX2 but without AVX-512 (2013), and the level that they have.
EMULATED = {"Nehalem": "default", "Haswell": "x86-64-v3"}
# Of the register FPCR: flush denormals; round toward plus and minus infinity, and toward zero.
SETTINGS = [0, 1 << 24, 1 << 22, 2 << 22, 3 << 22]


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: apt-get install qemu-user")
    return found


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Compile the driver against libpycomm."""
    binary = tmp_path_factory.mktemp("portable") / "driver"
    link = (LIBRARY / "libpycomm.so", f"-Wl,-rpath,{LIBRARY}")
    compile_cpp(DRIVER, binary, "-std=gnu++17", "-O1", f"-I{ROOT / 'csrc'}", link=link)
    return binary


def command_of(name: str, driver: Path) -> list[str]:
    """Return the command that runs the driver on a processor."""
    if name == "aarch64":
        if not AARCH64.exists():
            pytest.skip("make portable compiles for aarch64, and needs qemu-user")
        return [emulator("qemu-aarch64"), str(AARCH64)]
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    if name == "native":
        return [str(driver)]
    return [emulator("qemu-x86_64"), "-cpu", name, str(driver)]


@pytest.fixture(params=["native", *EMULATED, "aarch64"])
def processor(request, driver):
    """Return the name of a processor, and the command that runs the driver on it."""
    return request.param, command_of(request.param, driver)


def text(value: str) -> bytes:
    """Return a text as the driver reads it."""
    return struct.pack("<Q", len(value)) + value.encode()


def answer(processor, request: bytes) -> bytes:
    """Run the driver."""
    _, command = processor
    done = subprocess.run(command, input=request, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_the_emulated_processor_lacks_what_its_name_says(processor):
    level, *ways = answer(processor, b"simd").decode().split()
    assert level == EMULATED.get(processor[0], level)
    assert processor[0] != "aarch64" or ways == ["streams", "instruction", "table"]


@cache
def coded() -> tuple[bytes, list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]]:
    """Return the requests for all golden vectors, and what each must answer."""
    request, wanted = b"", []
    for spec, case in all_entries():
        codec = pycomm.codec(spec)
        file = golden(codec.name)
        x, residual = file[f"{case}/x"], file[f"{case}/residual"]
        request += b"code" + text(codec.spec()) + struct.pack("<QQ", x.size, 5 * codec.granule)
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


def values(dtype: str, numel: int, seed: int) -> np.ndarray:
    """Return any bits, of floats many NaNs, Infs and tiny values."""
    if dtype not in CANONICAL:
        raw = np.random.default_rng(seed).integers(0, 256, 8 * numel, dtype=np.uint8)
        size = _C.size_of(_C.DType.__members__[dtype])
        return raw[: size * numel] & (1 if dtype == "bool" else 255)
    x = special(seed, dtype, numel)
    x[: numel // 3] >>= np.array(8 * x.itemsize - 4, x.dtype)
    return x


def test_reductions_and_checksums_have_the_same_bits(processor):
    """At sizes with and without a rest, however a thread of AArch64 is set to calculate."""
    request, wanted = b"", b""
    for (core, how), numel in product(REDUCIBLE, (7, 1027)):
        inputs = [values(core.name, numel, seed) for seed in range(3)]
        out = np.empty_like(inputs[0])
        if how.name == "premul_sum":
            _C.scale(core, inputs[0].ctypes.data, out.ctypes.data, numel, 0.3)
        else:
            out = folded(core, how, inputs)
        for fpcr in SETTINGS if processor[0] == "aarch64" else SETTINGS[:1]:
            head = core.value, how.value, len(inputs), numel, fpcr
            request += b"fold" + struct.pack("<5Q", *head) + b"".join(x.tobytes() for x in inputs)
            wanted += out.tobytes()
            wanted += struct.pack("<3I", *(_C.crc32c(x.tobytes()) for x in inputs))
    assert answer(processor, request) == wanted


# ------------------------------------------------------------------------------------------- groups
# Ranks on different processors in one group: equal bits on all, and those of a group of one kind.


NUMEL, STEPS = 10007, 3  # odd, and of several segments
CODED = [
    *("bf16", "int4", "int8:rounding=stochastic", "mxfp4"),
    *("sign", "eden2", "topk:0.01", "lossless"),
]


def of_rank(rank: int, ranks: int, folder: Path) -> bytes:
    """Return what a rank is asked: values of many magnitudes, zeros and denormals among them."""
    random = np.random.default_rng(rank)

    def values() -> bytes:
        x = random.standard_normal(NUMEL) * 2.0 ** -random.integers(0, 16, NUMEL)
        x[::101], x[::103] = 0, 1e-39
        return x.astype(np.float32).tobytes()

    request = b"join" + text(str(folder)) + struct.pack("<QQ", rank, ranks)
    request += b"move" + struct.pack("<Q", NUMEL) + values()
    for spec in CODED:
        request += b"step" + text(pycomm.codec(spec).spec()) + struct.pack("<QQ", STEPS, NUMEL)
        request += b"".join(values() for _ in range(STEPS))
    return request


def answers(commands: list[list[str]], folder: Path) -> list[list[np.ndarray]]:
    """Run a group with a command for each rank; return its results, then its own residuals."""
    (folder / "store").mkdir(parents=True)
    ranks = len(commands)

    def ask(rank: int) -> list[np.ndarray]:
        request = of_rank(rank, ranks, folder / "store")
        got = np.frombuffer(answer(("", commands[rank]), request), np.uint8)
        moved, steps = np.split(got, [4 * NUMEL * (2 + ranks)])
        averages, residuals = np.split(steps.reshape(len(CODED), -1), [4 * NUMEL * STEPS], axis=1)
        return [moved, averages, residuals]

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(ask, range(ranks)))


@pytest.mark.parametrize("kinds", [["native", "Haswell", "Nehalem"], ["aarch64", "native"] * 2])
def test_ranks_of_any_processors_have_equal_bits(driver, tmp_path, kinds):
    found = answers([command_of(kind, driver) for kind in kinds], tmp_path / "mixed")
    expected = answers([command_of("native", driver)] * len(kinds), tmp_path / "alike")
    for rank, parts in enumerate(found):
        for part, want, first in zip(parts, expected[rank], found[0], strict=True):
            assert np.array_equal(part, want)
            assert part is parts[2] or np.array_equal(part, first)


# --------------------------------------------------------------------------------- make portable


def flags() -> list[str]:
    """Return the flags of CMakeLists.txt that decide about bits, and what ranks compare."""
    (found,) = re.findall(r"^set\(CXX_FLAGS (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.M)
    version = f'-DPYCOMM_VERSION="{pycomm.__version__}"'
    return ["-std=gnu++17", "-O1", f"-I{ROOT / 'csrc'}", version, *found.split()]


def compile_aarch64(folders: Sequence[str]) -> None:
    """Compile what is older than any header that it might include, and link the driver."""
    sources = [DRIVER]
    for folder in folders:
        sources += sorted((ROOT / "csrc" / folder).rglob("*.cpp"))
    newest = max(f.stat().st_mtime for d in folders for f in (ROOT / "csrc" / d).rglob("*.h"))
    FOLDER.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        made = FOLDER / ("_".join(source.relative_to(ROOT).parts) + ".o")
        if not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            command = [COMPILER, *flags(), "-c", str(source), "-o", str(made)]
            subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_one, sources))
    # A static glibc warns that OpenSSL, which TLS loads at run time, needs the same glibc.
    libraries = ["-lpthread", "-ldl", "-Wl,--no-warnings"]
    subprocess.run(
        [COMPILER, "-static", *map(str, objects), *libraries, "-o", str(AARCH64)], check=True
    )


if __name__ == "__main__":
    if shutil.which(COMPILER) is None:
        raise SystemExit(f"there is no {COMPILER}: apt-get install g++-aarch64-linux-gnu qemu-user")
    compile_aarch64(["core", "codecs", "transports", "collectives"])
    tests = [sys.executable, "-m", "pytest", "--quiet", str(Path(__file__).parent)]
    raise SystemExit(subprocess.run(tests, check=False).returncode)
