"""PTX checks: instructions that change bytes, and that no codec's kernel may contain.

PTX shows contraction, division and denormal handling: the next compiler, ptxas, does not change an
operation that names its rounding (mul.rn).
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import site
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from pycomm.codecs.convert import DTYPES
from pycomm.codecs.cuda.sources import include_folder
from tests.extent import FULL

# `make test` compiles for one GPU and `make soak` for all: a compiler takes minutes for each.
ARCHS = (80, 90, 100) if os.environ.get("PYCOMM_TEST_ARCHS") == "all" else (90,)
# Triton takes seconds for each: some of them stand for every kind of arithmetic.
ALL_TRITON_SPECS = [
    "fp32",
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8:rounding=stochastic",
    "int4",
    "int4:block=32",
    "int5:rounding=stochastic",
    "sign",
]
SOME_TRITON_SPECS = ["bf16", "fp8_e4m3", "int4", "sign"]
TRITON_SPECS = ALL_TRITON_SPECS if FULL else SOME_TRITON_SPECS
CONVERSIONS = [
    (source, target)
    for number, source in enumerate(DTYPES)
    for target in (DTYPES if FULL else DTYPES[number - 1 :][:1])
]
CALLS = ("encode", "encode_feedback", "decode", "decode_add")


def calls_of(spec: str) -> tuple[str, ...]:
    """Return the calls that are compiled for a spec: in `make test` all four for one of them."""
    # The kernels of the plain calls are those of the others without the residual or the sum.
    return CALLS if FULL or spec == "int4" else ("encode_feedback", "decode_add")


INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)\s", re.MULTILINE)
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}
INEXACT = {"approx", "full", "ftz"}
CONTRACTIBLE = {"add", "sub", "mul"}
ROUNDINGS = {"rn", "rz", "rm", "rp"}


def instructions(ptx: str) -> list[str]:
    """Return every opcode with its modifiers, without comments."""
    return INSTRUCTION.findall(re.sub(r"//.*", "", ptx))


# ±1 by a condition; and a fused operation with the registers of its factors.
SIGN = re.compile(
    r"^\s*selp\.f32\s+(%\w+), 0f(?:BF800000, 0f3F800000|3F800000, 0fBF800000), %\w+;", re.MULTILINE
)
SET = re.compile(r"^\s*(?:@!?%\w+\s+)?(?!st\.|red\.)[a-z][\w.:]+\s+\{?(%f\w*|%r\w*)", re.MULTILINE)
FUSED = re.compile(r"^\s*fma\.rn\.f32\s+%\w+, (%\w+), (%\w+), %\w+;", re.MULTILINE)


def without_signs(ptx: str) -> str:
    """Return PTX without the fused operations that are additions: of b and ±a.

    In a * s + b with s = ±1 the product is exact, so that only the addition rounds. s is a register
    that nothing else sets in its kernel.
    """
    kernels = re.split(r"(?=^\s*\.(?:visible )?\.?entry)", ptx, flags=re.MULTILINE)
    for place, kernel in enumerate(kernels):
        sets = Counter(SET.findall(kernel))
        signs = {register for register in SIGN.findall(kernel) if sets[register] == 1}
        kernels[place] = FUSED.sub(
            lambda fused, signs=signs: "" if signs & set(fused.groups()) else fused[0], kernel
        )
    return "".join(kernels)


def inexact(ptx: str) -> list[str]:
    """Return the instructions whose result is not that of one IEEE operation, rounded once."""
    found = []
    for instruction in instructions(without_signs(ptx)):
        opcode, *modifiers = instruction.split(".")
        words = set(modifiers)
        if not words & FLOATS:
            continue
        fused = opcode in ("fma", "mad")
        may_be_fused = opcode in CONTRACTIBLE and not words & ROUNDINGS
        if fused or may_be_fused or words & INEXACT:
            found.append(instruction)
    return found


def run_nvcc(source: Path, folder: Path, archs: Sequence[int | str], *options: str) -> str:
    """Compile a file of kernels, and return what ptxas reports; skip the test without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip(f"there is no nvcc to compile {source.name}")
    done = subprocess.run(
        [
            *(nvcc, "-std=c++17", "-O3", "-fmad=false", "--threads=0", f"-I{include_folder()}"),
            *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
            *("-Xptxas=-v", *options, "-c", source, "-o", folder / f"{source.stem}.o"),
        ],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_nvcc_and_keep(source: Path, folder: Path, archs: Sequence[int | str]) -> None:
    """Compile a file of kernels; keep the PTX, the cubins, and the report as a .log."""
    report = run_nvcc(source, folder, archs, "--keep", "--keep-dir", str(folder))
    (folder / f"{source.stem}.log").write_text(report)


def spilled(report: str) -> list[tuple[str, ...]]:
    """Return each kernel's bytes of stack, and of registers that are stored and loaded there."""
    return re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", report)


def kept(folder: Path, name: str, arch: int, ending: str) -> Path:
    """Return an output of ``nvcc --keep``; its name includes the GPU if there are several."""
    of_several = folder / f"{name}.compute_{arch}.{ending}"
    return of_several if of_several.exists() else folder / f"{name}.{ending}"


def cuobjdump() -> str | None:
    """Return NVIDIA's disassembler: from the PATH, from nvcc's folder, or from Triton."""
    if found := shutil.which("cuobjdump"):
        return found
    if nvcc := shutil.which("nvcc"):
        beside = Path(nvcc).resolve().with_name("cuobjdump")
        if beside.exists():
            return str(beside)
    try:
        import triton.backends.nvidia as nvidia
    except ImportError:
        return None
    brought = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    return str(brought) if brought.exists() else None


@cache
def nvrtc() -> ctypes.CDLL:
    """Load libnvrtc from NVIDIA's wheel or from a CUDA toolkit; skip the test without one."""
    packages = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    folders = [Path(p, "nvidia", d, "lib") for p in packages for d in ("cu13", "cuda_nvrtc")]
    folders.append(Path("/usr/local/cuda/lib64"))
    for folder in folders:
        libraries = sorted(folder.glob("libnvrtc.so.*"))
        if libraries:
            # This is loaded first: NVRTC loads it by name, which may not be on the library path.
            for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
                if "alt" not in builtins.name:
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(libraries[0]))
    pytest.skip("there is no libnvrtc: pip install nvidia-cuda-nvrtc")


def compile_to_ptx(source: str, kernels: list[str], options: list[str]) -> str:
    """Return the PTX of the named template instances, by NVRTC: it needs no GPU.

    Raises:
        AssertionError: with NVRTC's message.
    """
    library = nvrtc()
    program = ctypes.c_void_p()
    assert (
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None) == 0
    )
    try:
        for kernel in kernels:
            assert library.nvrtcAddNameExpression(program, kernel.encode()) == 0
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = library.nvrtcCompileProgram(program, len(options), words)
        assert status == 0, _read(library, program, "ProgramLog")
        return _read(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, text) == 0
    return text.value.decode()
