"""Launches of the codecs' kernels: the .cpp files and the tables of the .cu files agree."""

from __future__ import annotations

import importlib
import sys
import types
from itertools import product
from typing import Any

import pytest
import torch

import pycomm
from pycomm import _C
from pycomm._C import recorded
from pycomm._cuda_wheel import STAMP
from pycomm.codecs import CODECS
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.cuda import sources
from pycomm.codecs.cuda.sources import has_kernels
from pycomm.codecs.implementations import implementation
from pycomm.codecs.sign import Sign
from pycomm.feedback import storage
from pycomm.momentum.passes import DTYPES, Kernels
from tests.codecs.cases import ROTATIONS, SPECS
from tests.codecs.cuda.emulated import (
    all_kernels,
    encode_launches,
    guarded,
    kernels,
    listed,
    run,
)
from tests.codecs.cuda.ptx import ARCHS
from tests.codecs.harness import check_ptx
from tests.torch.harness import same_bits
from tests.torch.optim.followed import KINDS, ByPasses, differing

NVRTC = "pycomm.codecs.cuda.nvrtc"
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
# Formats that choose every kernel that there is; the other tests run fewer.
FORMATS = [
    *SPECS,
    *ROTATIONS,
    *(f"sign:block={block}" for block in BLOCKS),
    *(f"{name}:block={block}" for name, block in product(("fp8", "fp8_e5m2"), BLOCKS)),
    *(
        f"quant:bits={bits},block={block},rounding={rounding}"
        for bits, block, rounding in product(range(2, 9), BLOCKS, ("nearest", "stochastic"))
    ),
    *(
        f"eden:bits={bits},size={size},scale={scale}"
        for bits, size, scale in product(range(1, 5), (32, 128, 1024), ("unbiased", "mmse"))
    ),
]


def test_tables_list_exactly_the_launched_kernels():
    # Of test_convert.py, and those below.
    others = ("convert::", "stored::", "pycomm::moments::")
    of_codecs = [name for name in listed(all_kernels()) if not name.startswith(others)]
    assert sorted(kernels(FORMATS)) == sorted(of_codecs)


def test_every_codec_has_kernels():
    assert [name for name in CODECS if not has_kernels(name)] == []


def test_recording_starts_nothing_and_ends_with_the_call():
    """What is recorded has addresses of no GPU. Later calls on the CPU are as before."""
    codec = Sign(64)
    x, payload = torch.randn(100), torch.zeros(codec.encoded_bytes(100), dtype=torch.uint8)
    args = EncodeArgs(x, payload, None, None, RandomKey(), 0)
    (launch,) = encode_launches(codec, args, payload)
    assert (launch.source, launch.kernel) == ("sign", "sign::encode_kernel<64, false>")
    assert launch.blocks == 1
    assert not payload.any()

    def fails() -> None:
        raise ValueError("from the call")

    with pytest.raises(ValueError, match="from the call"):
        recorded(fails)
    assert codec.encode(x, payload).any()


@pytest.mark.parametrize("missing", [4, 1024])
def test_a_kernel_that_writes_beyond_its_scratch_memory_is_told(missing):
    """As with a libpycomm.so that is older than the sources: it lends what another layout needs."""
    codec = pycomm.codec("topk:0.01")
    x, payload = torch.randn(100), torch.zeros(codec.encoded_bytes(100), dtype=torch.uint8)
    args = EncodeArgs(x, payload, None, None, RandomKey(), 0)
    lent = 4 * 10248 - missing  # kCleared words, of topk/scratch.h

    def clear() -> None:
        with guarded(lent) as scratch:
            run(encode_launches(codec, args, scratch)[:1], all_kernels())

    with pytest.raises(AssertionError, match=f"wrote {missing} bytes beyond {lent} of scratch"):
        clear()


def test_nvrtc_is_an_implementation_where_cupy_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.delitem(sys.modules, NVRTC, raising=False)
    run = implementation("quant", "nvrtc", "cuda")
    assert run.launch.__module__ == NVRTC
    monkeypatch.delitem(sys.modules, NVRTC)


def test_kernels_of_other_sources_are_refused(monkeypatch, tmp_path):
    """They would read other arguments than libpycomm.so makes, and write anywhere."""
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.delitem(sys.modules, NVRTC, raising=False)
    compile_kernel = importlib.import_module(NVRTC).compile_kernel
    monkeypatch.delitem(sys.modules, NVRTC)
    (tmp_path / STAMP).write_text("of last year")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    for compiles in (lambda: compile_kernel("cast", "any", "90"), all_kernels.__wrapped__):
        with pytest.raises(pycomm.Error, match="built from other sources than the kernels in"):
            compiles()


# ----------------------------------------------------------------------------------------- feedback
# Encoding with feedback on a GPU: kernels load and store residuals with the bits of the CPU.
#
# The kernels are compiled by g++ (tests/codecs/cuda/emulated.py), and by NVRTC and nvcc to look at.


FED = [
    *("int8", "int4:block=64", "sign", "fp8_e4m3", "bf16", "mxfp4", "nvfp4", "lossless"),
    *("eden2", "eden:bits=2,size=128", "eden:bits=4,size=2048,scale=mmse"),
]
SIZES = [1, 31, 33, 4096, 5003]
KERNELS = [
    f"stored::{way}_kernel<stored::{form}>"
    for way in ("load", "store")
    for form in ("Float32", "Int8")
]


def values(numel: int, seed: int) -> torch.Tensor:
    """Return values of all magnitudes, so that some overflow bfloat16 and blocks of int8."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    if numel > 1000:
        x[100], x[300], x[500], x[2100] = 3.4e38, 2.0**-120, float("inf"), 1e25
    return x


def encode(
    spec: str, x: torch.Tensor, kind: str, form: str, old: torch.Tensor, *, on_gpu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload and the new residual, as it is stored."""
    codec = pycomm.codec(spec)
    out = torch.full((codec.encoded_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    fresh = torch.full_like(old, 7)

    def call(room: torch.Tensor) -> None:
        codec.native.encode(
            x.data_ptr(),
            x.numel(),
            out.data_ptr(),
            kind=_C.FeedbackKind.__members__[kind],
            storage=_C.FeedbackStorage.__members__[form],
            decay=0.9,
            error=(old.data_ptr(), fresh.data_ptr()),
            stream=0 if on_gpu else None,
            scratch=room.data_ptr(),
        )

    if not on_gpu:
        call(torch.empty(0, dtype=torch.uint8))
        return out, fresh
    with guarded(4 * x.numel() + 512 + codec.native.scratch_bytes(x.numel())) as room:
        launches = recorded(lambda: call(room))
        if codec.name in ("topk", "lossless"):
            assert launches[0].kernel.startswith("stored::load")
            assert launches[-1].kernel.startswith("stored::store")
        else:
            assert len(launches) == 1
        run(launches, all_kernels())
    return out, fresh


@pytest.mark.parametrize("form", ["int8", "float32"])
@pytest.mark.parametrize("kind", ["residual", "decay"])
def test_kernels_of_feedback_have_the_bits_of_the_cpu(kind, form):
    if (kind, form) == ("residual", "float32"):
        pytest.skip("by design: the codec's kernels read and write it themselves")
    for spec in FED:
        for numel in SIZES if spec == "int8" else SIZES[-1:]:
            old = storage.zeros(form, numel, torch.device("cpu"))
            storage.store(values(numel, 1).nan_to_num(0.0, 1e30, -1e30), old)
            want = encode(spec, values(numel, 2), kind, form, old, on_gpu=False)
            got = encode(spec, values(numel, 2), kind, form, old, on_gpu=True)
            for g, w in zip(got, want, strict=True):
                assert same_bits(g, w), (spec, numel)


def test_momentum_has_no_kernels():
    old = torch.zeros(64)
    with pytest.raises(pycomm.Error, match="momentum has no kernels on a GPU"):
        encode("int8", values(64, 1), "momentum", "float32", old, on_gpu=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles_them_exactly(arch):
    check_ptx("feedback", KERNELS, arch)


# ------------------------------------------------------------------------------------------ moments
# Kernels of coded moments, compiled by g++: the bits of the passes on the CPU, over some steps.


def launch(launches: Any, device: torch.device) -> None:
    run(launches, all_kernels())


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "scatters"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_kernels_have_the_bits_of_the_cpu(form, dtype, shards, scatters, kind):
    ways = Kernels(torch.device("cpu"), launch), Kernels(torch.device("cpu"))
    assert not differing(*(ByPasses(way, form, dtype, shards, scatters, kind) for way in ways))
