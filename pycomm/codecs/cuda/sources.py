"""Locations of the CUDA kernels' sources, and the options for NVRTC."""

from __future__ import annotations

from pathlib import Path

from pycomm._build import source_root

# -default-device: unmarked functions are device code, since NVRTC compiles nothing else.
OPTIONS = ("-std=c++17", "-fmad=false", "-default-device")

# Codecs with kernels: csrc/codecs/<name>.cu, or a file in a folder of that name.
SOURCES = (
    *("cast", "eden", "lossless", "mx", "quant", "randomk", "rotate", "sign", "ternary", "topk"),
)
ROOMS = ("topk",)


def include_folder() -> Path:
    """Return the folder of the C++ sources, which are installed with the package."""
    return source_root() / "csrc"


def source_file(name: str) -> Path:
    """Return the file of a codec's kernels, in :func:`include_folder`."""
    return Path("codecs", name, f"{name}.cu") if name in ROOMS else Path("codecs", f"{name}.cu")


def source(name: str) -> str:
    """Return the source to compile."""
    return f'#include "{source_file(name)}"\n'


def compile_options(arch: str | int) -> tuple[str, ...]:
    """Return NVRTC's options to compile a source for GPUs of ``arch``, such as 90."""
    return (*OPTIONS, f"-I{include_folder()}", f"-arch=sm_{arch}")
