"""NVRTC by its C interface, for tests: it compiles for any GPU on a machine without one."""

from __future__ import annotations

import ctypes
import site
import sys
from functools import cache
from pathlib import Path

import pytest


@cache
def load() -> ctypes.CDLL:
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
    """Return the PTX of the named template instances.

    Raises:
        AssertionError: with NVRTC's message.
    """
    nvrtc = load()
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None) == 0
    try:
        for kernel in kernels:
            assert nvrtc.nvrtcAddNameExpression(program, kernel.encode()) == 0
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = nvrtc.nvrtcCompileProgram(program, len(options), words)
        assert status == 0, _read(nvrtc, program, "ProgramLog")
        return _read(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.value.decode()
