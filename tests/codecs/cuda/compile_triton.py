"""Compiler for every Triton kernel that a list of codecs launches, for absent GPUs.

usage: python -m tests.codecs.cuda.compile_triton FOLDER ARCH...
Writes FOLDER/<arch>-<spec>-<call>.ptx and .cubin; those of a call's further kernels have a number.

The launchers of pycomm.triton_kernels run as on a GPU, with CPU tensors and with Triton's driver
replaced by one that only names the architecture; every launch stops once its kernel is compiled.
This is a separate program because Triton chooses between its compiler and its interpreter at
import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import pycomm
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.convert import Conversion
from pycomm.codecs.implementations import implementation
from tests.codecs.cuda.ptx import CONVERSIONS, TRITON_SPECS, calls_of

NUMEL = 1 << 16
KEY = RandomKey(seed=1 << 63, step=1 << 31, tensor=1 << 31)


class NoGpu:
    """The part of a driver that Triton's launch path needs before the kernel is compiled."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached per device

    def get_current_stream(self, device: int) -> int:
        return 0


def calls(spec: str) -> Iterator[tuple[str, Any]]:
    """Yield the four calls of a codec, by name."""
    codec = pycomm.codec(spec)
    run: Any = implementation(codec.name, "triton", "cuda")
    x, residual = torch.zeros(NUMEL), torch.zeros(NUMEL)
    payload = torch.zeros(codec.encoded_bytes(NUMEL), dtype=torch.uint8)
    plain = EncodeArgs(x, payload, None, None, KEY, 0)
    feedback = EncodeArgs(x, payload, residual, residual, KEY, 0)
    yield "encode", lambda: run.encode(codec, plain)
    yield "encode_feedback", lambda: run.encode(codec, feedback)
    yield "decode", lambda: run.decode(codec, payload, x, add=False)
    yield "decode_add", lambda: run.decode(codec, payload, x, add=True)


def conversions() -> Iterator[tuple[str, Any]]:
    """Yield the conversions of `ptx.CONVERSIONS`, by name."""
    from pycomm.triton_kernels.convert import convert

    for source, target in CONVERSIONS:
        x, out = torch.zeros(NUMEL, dtype=source), torch.zeros(NUMEL, dtype=target)
        name = f"{source}-{target}".replace("torch.", "")
        yield (
            name,
            lambda x=x, out=out: convert(Conversion(x, out, divisor=2.0, found_inf=torch.zeros(1))),
        )


def compile_only(compiled: list[Any]) -> None:
    """End every launch of a kernel after its compilation, and collect the compiled kernels."""
    run = JITFunction.run

    def run_without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = run_without_launch


def main(folder: Path, archs: list[int]) -> None:
    compiled: list[Any] = []
    compile_only(compiled)
    work = [
        (spec, name, call)
        for spec in TRITON_SPECS
        for name, call in calls(spec)
        if name in calls_of(spec)
    ]
    work += [("convert", name, call) for name, call in conversions()]
    for arch in archs:
        driver.set_active(NoGpu(arch))
        for spec, name, call in work:
            compiled.clear()
            call()
            for number, kernel in enumerate(compiled):
                stem = f"{arch}-{spec.replace(':', '-').replace('=', '-')}-{name}{number or ''}"
                (folder / f"{stem}.ptx").write_text(kernel.asm["ptx"])
                (folder / f"{stem}.cubin").write_bytes(kernel.asm["cubin"])
    print(f"triton {triton.__version__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(arch) for arch in sys.argv[2:]])
