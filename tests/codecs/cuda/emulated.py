"""The CUDA kernels of the codecs on the CPU: compiled by g++, each block as 256 coroutines.

This tests kernels, launch shapes and parameter structs without a GPU, but neither their speed nor
nvcc's code. The implementation has the interface of those of pycomm.codecs.base.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import pycomm
from pycomm.codecs import Lossless, TopK
from pycomm.codecs.args import EncodeArgs
from pycomm.codecs.base import Codec
from pycomm.codecs.cuda import lossless, topk
from pycomm.codecs.cuda.calls import decode_calls, encode_calls, scratch_bytes
from pycomm.codecs.cuda.kernels import Call, EncodeParams, amax_call
from pycomm.codecs.cuda.names import amax_kernel, decode_kernel, encode_kernel
from pycomm.codecs.cuda.sources import include_folder
from tests.codecs.cases import ROTATIONS, SPECS

FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared")


def kernels(specs: list[str] = SPECS + ROTATIONS) -> dict[str, str]:
    """Return every kernel that these codecs launch, with the name of its struct of arguments."""
    names = {}
    for codec in map(pycomm.codec, specs):
        if isinstance(codec, TopK):
            names |= dict.fromkeys(topk.kernels(codec), "topk::TopkParams")
            continue
        if isinstance(codec, Lossless):
            names |= dict.fromkeys(lossless.kernels(codec), "lossless::LosslessParams")
            continue
        for flag in (False, True):
            names[encode_kernel(codec, flag)] = "EncodeParams"
            names[decode_kernel(codec, flag)] = "DecodeParams"
            if codec.combine == "sum":
                names[encode_kernel(codec, flag, summed=True)] = "EncodeParams"
        if codec.needs_amax:
            names[amax_kernel(codec)] = "EncodeParams"
    return names


def compute_amax(
    codec: Codec, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    _run([amax_call(codec, x, residual, out)])


def encode(codec: Codec, args: EncodeArgs) -> None:
    scratch = _scratch(codec, args.x)
    _run(encode_calls(codec, args, scratch))


def decode(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> None:
    scratch = _scratch(codec, out)
    _run(decode_calls(codec, payload, out, scratch, add=False))


def decode_add(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> None:
    scratch = _scratch(codec, out)
    _run(decode_calls(codec, payload, out, scratch, add=True))


def _scratch(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Return memory that is not zeroed."""
    return torch.full((scratch_bytes(codec, x.numel()),), 0xA5, dtype=torch.uint8)


def _run(calls: list[Call]) -> None:
    for call in calls:
        wrong = _library().run(call.kernel.encode(), call.blocks, ctypes.byref(call.params))
        assert not wrong, f"{call.kernel} is not in kernels()"


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the CUDA kernels for the CPU")
    lines = [
        '#include "emulated.h"',
        '#include "codecs/cast.cu"',
        '#include "codecs/eden.cu"',
        '#include "codecs/lossless.cu"',
        '#include "codecs/mx.cu"',
        '#include "codecs/quant.cu"',
        '#include "codecs/randomk.cu"',
        '#include "codecs/rotate.cu"',
        '#include "codecs/sign.cu"',
        '#include "codecs/ternary.cu"',
        '#include "codecs/topk/topk.cu"',
        "using namespace pycomm::codecs;",
        'extern "C" int run(const char* name, unsigned blocks, const void* params) {',
    ]
    for name, struct in kernels().items():
        start = f"{name}(*static_cast<const {struct}*>(params));"
        lines.append(f'if (!strcmp(name, "{name}")) {{')
        lines.append(f"return emulated::launch(blocks, [=] {{ {start} }}), 0; }}")
    lines += ["return 1; }", 'extern "C" size_t encode_params() { return sizeof(EncodeParams); }']
    lines += ['extern "C" size_t topk_params() { return sizeof(topk::TopkParams); }']
    lines += ['extern "C" size_t lossless_params() { return sizeof(lossless::LosslessParams); }']
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        source.write_text("\n".join(lines))
        include = (f"-I{Path(__file__).parent}", f"-I{include_folder()}")
        subprocess.run([compiler, *FLAGS, *include, str(source), "-o", str(binary)], check=True)
        library = ctypes.CDLL(str(binary))
    assert library.encode_params() == ctypes.sizeof(EncodeParams)
    assert library.topk_params() == ctypes.sizeof(topk.TopkParams)
    assert library.lossless_params() == ctypes.sizeof(lossless.LosslessParams)
    return library
