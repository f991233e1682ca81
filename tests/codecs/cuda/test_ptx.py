"""GPU code of the codecs, compiled without a GPU: each operation rounds once, registers are not
spilled, and memory is accessed 16 bytes at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import pycomm
from pycomm.codecs.cuda.sources import compile_options, include_folder, source, source_file
from tests.codecs.cases import ROTATIONS, SPECS
from tests.codecs.cuda.emulated import kernels
from tests.codecs.cuda.ptx import (
    ARCHS,
    CALLS,
    CONVERSIONS,
    TRITON_SPECS,
    calls_of,
    compile_to_ptx,
    cuobjdump,
    inexact,
    instructions,
    kept,
    run_nvcc_and_keep,
    spilled,
)
from tests.codecs.cuda.sass import LINE, budgets, calls, functions
from tests.compiling import GENERATED
from tests.extent import FULL

pytestmark = pytest.mark.timeout(600)  # each compiler's first test waits for all of its files

# The minimum number of kernels of each.
SOURCES = {
    "cast": 20,
    "eden": 36,
    "lossless": 7,
    "mx": 24,
    "quant": 30,
    "sign": 16,
    "topk": 20,
}
# Compilers take half a minute for each of these.
LONG = () if FULL else ("eden", "mx")
# And nvcc for each of the others up to a quarter of one: those of few kernels stand for them.
BY_NVCC = list(SOURCES) if FULL else ["lossless", "sign"]
# Beside codecs: kernels of csrc/optim, of feedback and of conversions.
OTHERS = {"moments": 18, "feedback": 4, **({"convert": 9} if FULL else {})}
every_arch = pytest.mark.parametrize("arch", ARCHS)
# Codecs of blocks with a scale.
SCALED = [name for name in SOURCES if name != "lossless"]
every_source = pytest.mark.parametrize("name", BY_NVCC)


# ------------------------------------------------------------------------ self-tests


PLUS_OR_MINUS_1 = "selp.f32 \t%f5, 0fBF800000, 0f3F800000, %p1;"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((PLUS_OR_MINUS_1, "fma.rn.f32 \t%f1, %f5, %f2, %f3;"), []),
        ((PLUS_OR_MINUS_1, "fma.rn.f32 \t%f1, %f2, %f5, %f3;"), []),
        ((PLUS_OR_MINUS_1, "fma.rn.f32 \t%f1, %f2, %f3, %f5;"), ["fma.rn.f32"]),
        (
            (PLUS_OR_MINUS_1, "@%p2 mov.f32 \t%f5, %f4;", "fma.rn.f32 %f1, %f5, %f2, %f3;"),
            ["fma.rn.f32"],
        ),
        (
            (PLUS_OR_MINUS_1.replace("0fBF8", "0fBF9"), "fma.rn.f32 %f1, %f5, %f2, %f3;"),
            ["fma.rn.f32"],
        ),
        ((PLUS_OR_MINUS_1, ".entry other(", "fma.rn.f32 %f1, %f5, %f2, %f3;"), ["fma.rn.f32"]),
        # Of a Triton kernel that divides by /, and of one with tl.exp.
        (
            ("div.full.f32 %r1, %r2, %r3;", "ex2.approx.f32 %r1, %r2;"),
            ["div.full.f32", "ex2.approx.f32"],
        ),
    ],
)
def test_inexact_instructions_are_found_and_fused_additions_pass(lines, found):
    assert inexact("".join(f"\t{line}\n" for line in lines)) == found


# -------------------------------------------------------------------------------- Triton


@pytest.fixture(scope="session")
def triton_folder(tmp_path_factory) -> Path:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton")
    cache = GENERATED / "triton"  # it knows what it holds by sources and options
    at_once = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.codecs.cuda.compile_triton", str(folder), str(arch)],
            env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        )
        for arch in ARCHS
    ]
    assert [process.wait() for process in at_once] == [0] * len(ARCHS)
    return folder


@every_arch
@pytest.mark.parametrize("call", CALLS)
def test_triton_kernels_are_exact(triton_folder, arch, call):
    compiled = sorted(triton_folder.glob(f"{arch}-*-{call}*.ptx"))
    wanted = sum(call in calls_of(spec) for spec in TRITON_SPECS)
    assert len([file for file in compiled if file.stem.endswith(f"-{call}")]) == wanted
    for file in compiled:
        ptx = file.read_text()
        assert inexact(ptx) == [], file.name
        assert f".target sm_{arch}" in ptx
        assert file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF")


@every_arch
def test_triton_converts_exactly(triton_folder, arch):
    compiled = sorted(triton_folder.glob(f"{arch}-convert-*.ptx"))
    assert len(compiled) == len(CONVERSIONS)
    for file in compiled:
        ptx = file.read_text()
        assert inexact(ptx) == [], file.name
        assert "div.rn.f32" in instructions(ptx)


@pytest.mark.parametrize("arch", sorted({row.arch for row in budgets()} & set(ARCHS)))
def test_triton_sign_takes_at_most_twice_the_native_one(triton_folder, arch):
    if cuobjdump() is None:
        pytest.skip("there is no cuobjdump to count a kernel's instructions")
    cubin = triton_folder / f"{arch}-sign-encode_feedback.cubin"
    sass = subprocess.run([cuobjdump(), "--dump-sass", cubin], check=True, capture_output=True)
    a_value = len(LINE.findall(sass.stdout.decode())) / 32  # a thread has so many values
    native = next(call for call in calls() if call.call == "sign encode, feedback")
    assert a_value < 2 * native.counted(budgets(), arch)


# ---------------------------------------------------------------------------------- nvcc


@pytest.fixture(scope="session")
def nvcc(tmp_path_factory) -> Callable[[str], Path]:
    """Compile a .cu file on first use; return the folder with PTX, cubins and ptxas's report."""

    @cache
    def compiled(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        run_nvcc_and_keep(include_folder() / source_file(name), folder, ARCHS)
        return folder

    return compiled


@every_arch
@every_source
def test_cuda_kernels_are_exact(nvcc, name, arch):
    ptx = kept(nvcc(name), name, arch, "ptx").read_text()
    assert f".target sm_{arch}" in ptx
    assert inexact(ptx) == []
    assert ("div.rn.f32" in instructions(ptx)) == (name in SCALED)


@every_arch
def test_kernels_of_optimizers_are_exact(nvcc, arch):
    ptx = kept(nvcc("moments"), "moments", arch, "ptx").read_text()
    assert inexact(ptx) == []
    assert {"sqrt.rn.f32", "div.rn.f32"} <= set(instructions(ptx))


@pytest.mark.parametrize("name", [*BY_NVCC, *OTHERS])
def test_cuda_kernels_spill_no_register(nvcc, name):
    found = spilled((nvcc(name) / f"{name}.log").read_text())
    assert len(found) >= {**SOURCES, **OTHERS}[name] * len(ARCHS)
    assert set(found) == {("0", "0", "0")}


# Of kernels by their names, the least numbers of loads and of stores. With whole rows, a kernel
# that adds or keeps a residual loads and stores 4 rows or more; so do topk's that scan values.
SCANS = "(keep|refill|second|third|count|choose|encode_chunks)"
ACCESSES = {
    "topk": [(SCANS, 4, 0), (f"{SCANS}.*true>$|first", 8, 0), ("fill|choose.*true>$", 0, 4)],
    "lossless": [
        *(("head_kernel", 4, 0), ("head_kernel.*true>$", 8, 4)),
        *(("decode_kernel", 0, 4), ("decode_kernel.*true>$", 4, 4)),
    ],
}
TILED = [("encode", 4, 0), ("encode.*true>$", 8, 4), ("decode", 0, 4)]


@every_arch
@every_source
def test_cuda_kernels_move_16_bytes_at_a_time(nvcc, name, arch):
    for kernel, (loads, stores) in wide_accesses(nvcc(name), name, arch).items():
        for pattern, least_loads, least_stores in ACCESSES.get(name, TILED):
            if re.search(pattern, kernel):
                assert (loads >= least_loads, stores >= least_stores) == (True, True), kernel


def wide_accesses(folder: Path, name: str, arch: int) -> dict[str, tuple[int, int]]:
    """Return each kernel's 16-byte loads and stores; none may use local memory."""
    if cuobjdump() is None:
        pytest.skip("there is no cuobjdump: it is in CUDA's toolkit and in Triton's package")
    counts = {}
    for kernel, sass in functions(kept(folder, name, arch, "cubin"), "--dump-sass").items():
        assert not re.search(r"\b(LDL|STL)\b", sass), f"{kernel} uses local memory"
        stores = len(re.findall(r"STG\.E\.EF\.128", sass))
        counts[kernel] = len(re.findall(r"LDG\.E\.128", sass)), stores
    assert len(counts) >= SOURCES[name]
    return counts


# --------------------------------------------------------------------------------- NVRTC


@every_arch
@pytest.mark.parametrize("name", [name for name in SOURCES if name not in LONG])
def test_nvrtc_compiles_the_packaged_sources(name, arch):
    wanted = list(kernels([spec for spec in SPECS + ROTATIONS if pycomm.codec(spec).name == name]))
    ptx = compile_to_ptx(source(name), wanted, list(compile_options(arch)))
    assert ptx.count(".entry") == len(wanted)
    assert inexact(ptx) == []


def test_nvrtc_with_contraction_is_found():
    wanted = [kernel for kernel in kernels(["int4"]) if "quant" in kernel]
    options = [word for word in compile_options(90) if word != "-fmad=false"]
    ptx = compile_to_ptx(source("quant"), wanted, options)
    assert {instruction.split(".")[0] for instruction in inexact(ptx)} >= {"fma"}


def test_nvrtc_that_flushes_denormals_is_found():
    """CuPy's own compile adds this option; see `pycomm.codecs.cuda.nvrtc`."""
    wanted = [kernel for kernel in kernels(["int4"]) if "quant" in kernel]
    options = [*compile_options(90), "-ftz=true"]
    ptx = compile_to_ptx(source("quant"), wanted, options)
    assert "mul.rn.ftz.f32" in inexact(ptx)
