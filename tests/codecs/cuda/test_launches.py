"""Launches of the codecs' kernels: the .cpp files and the tables of the .cu files agree."""

from __future__ import annotations

import importlib
import sys
import types
from itertools import product

import pytest
import torch

import pycomm
from pycomm._cuda_wheel import STAMP
from pycomm.codecs import CODECS
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.cuda import sources
from pycomm.codecs.cuda.launches import encode_launches, recorded
from pycomm.codecs.cuda.sources import has_kernels
from pycomm.codecs.implementations import implementation
from pycomm.codecs.quant import Quant
from pycomm.codecs.sign import Sign
from tests.codecs.cases import ROTATIONS, SPECS
from tests.codecs.cuda.emulated import all_kernels, guarded, kernels, listed, run

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
        f"{name}:rounding={rounding}"
        for name, rounding in product(
            ("mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "nvfp4"),
            ("nearest", "stochastic"),
        )
    ),
    *(
        f"eden:bits={bits},size={size},scale={scale}"
        for bits, size, scale in product(range(1, 5), (32, 128, 1024), ("unbiased", "mmse"))
    ),
]


def formats() -> list[str]:
    """Return those that are valid."""

    def valid(spec: str) -> bool:
        try:
            pycomm.codec(spec)
        except ValueError:
            return False
        return True

    return [spec for spec in FORMATS if valid(spec)]


def test_tables_list_exactly_the_launched_kernels():
    # Of test_convert.py, test_feedback_kernels.py and test_moments.py.
    others = ("convert::", "stored::", "pycomm::moments::", "pycomm::adamw::")
    of_codecs = [name for name in listed(all_kernels()) if not name.startswith(others)]
    assert sorted(kernels(formats())) == sorted(of_codecs)


def test_every_codec_has_kernels():
    assert [name for name in CODECS if not has_kernels(name)] == []
    assert not has_kernels("powersgd")


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


def test_arguments_are_checked_as_everywhere():
    codec = Quant(bits=4)
    x, payload = torch.randn(100), torch.zeros(codec.encoded_bytes(100), dtype=torch.uint8)
    args = EncodeArgs(x, payload, None, None, RandomKey(), 3)
    with pytest.raises(pycomm.Error, match="is not a multiple of"):
        encode_launches(codec, args, payload)


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
    assert run.encode.__module__ == NVRTC
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
