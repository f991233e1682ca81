"""Run-time compilation of the CUDA kernels of csrc/codecs, where pycomm was built without nvcc.

A kernel is compiled at its first use in a process, in a tenth of a second; with a rotation, in one
second. CuPy provides NVRTC and launches kernels. CuPy's own compilation is not used, because it
flushes denormal numbers to zero (-ftz=true), which changes bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy
import torch

from pycomm import _C
from pycomm._C import Launch
from pycomm.codecs.cuda.sources import check_library, compile_options, source


def launch(launches: list[Launch], device: torch.device) -> None:
    """Launch kernels, one after the other, on torch's current stream of a device."""
    handle = torch.cuda.current_stream(device).cuda_stream
    with cupy.cuda.Device(device.index), _stream(handle, device.index):
        for each in launches:
            # An array of one element is passed by value.
            params = numpy.frombuffer(each.params, dtype=f"V{len(each.params)}")
            kernel = _kernel(each.source, each.kernel, device.index)
            kernel((each.blocks,), (_C.CUDA_THREADS,), (params,))


@cache
def _kernel(name: str, kernel: str, device: int) -> Any:
    binary, symbol = compile_kernel(name, kernel, cupy.cuda.Device(device).compute_capability)
    module = cupy.cuda.Module()
    module.load(binary)
    return module.get_function(symbol)


def compile_kernel(name: str, kernel: str, arch: str) -> tuple[bytes, str]:
    """Compile one kernel of csrc/codecs/``name``.cu for GPUs of ``arch``; no GPU is needed.

    Args:
        kernel: its C++ name, with its template arguments.
        arch: compute capability such as "90".

    Returns:
        A cubin, and the kernel's name in it.

    Raises:
        Error: libpycomm.so is of other sources than the kernel.
        RuntimeError: compilation failed; the text has the compiler's output.
    """
    check_library()
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    try:
        nvrtc.addNameExpression(program, kernel)
        try:
            nvrtc.compileProgram(program, compile_options(arch))
        except nvrtc.NVRTCError as error:
            words = nvrtc.getProgramLog(program)
            raise RuntimeError(f"NVRTC cannot compile {kernel}: {error}\n{words}") from error
        return nvrtc.getCUBIN(program), nvrtc.getLoweredName(program, kernel)
    finally:
        nvrtc.destroyProgram(program)


class _TorchStream:
    """A torch stream with the protocol that CuPy reads."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _stream(handle: int, device: int) -> Any:
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_TorchStream(handle))
    return cupy.cuda.ExternalStream(handle, device)  # CuPy before 14
