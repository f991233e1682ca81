"""Locations of the CUDA kernels' sources, and the options for NVRTC."""

from __future__ import annotations

from pathlib import Path

from pycomm._build import PACKAGE, source_root
from pycomm._cuda_wheel import STAMP, hash_of_headers
from pycomm.errors import Error

# -default-device: unmarked functions are device code, since NVRTC compiles nothing else.
OPTIONS = ("-std=c++17", "-fmad=false", "-default-device")


def include_folder() -> Path:
    """Return the folder of the C++ sources, which are installed with the package."""
    return source_root() / "csrc"


def check_library() -> None:
    """Check that kernels which are compiled from the sources take the arguments of libpycomm.so.

    Raises:
        Error: it was built from other headers.
    """
    stamp = PACKAGE / STAMP
    if stamp.exists() and stamp.read_text() != hash_of_headers(include_folder()):
        raise Error(
            f"libpycomm.so in {PACKAGE} was built from other sources than the kernels in "
            f"{include_folder()}: run `make build` in a checkout, else install pycomm again"
        )


def source_file(name: str) -> Path:
    """Return the file of some kernels, in :func:`include_folder`: by default a codec's."""
    folder = include_folder()
    for room in (Path("codecs", name), Path("optim")):
        if (folder / room / f"{name}.cu").exists():
            return room / f"{name}.cu"
    return Path("codecs", f"{name}.cu")


def has_kernels(name: str) -> bool:
    """Return whether a codec has kernels: csrc/codecs/<name>.cu, or one in a folder <name>."""
    return (include_folder() / source_file(name)).exists()


def source(name: str) -> str:
    """Return the source to compile. Kernels have names as seen from ``pycomm::codecs``."""
    return f'#include "{source_file(name)}"\nusing namespace pycomm::codecs;\n'


def compile_options(arch: str | int) -> tuple[str, ...]:
    """Return NVRTC's options to compile a source for GPUs of ``arch``, such as 90."""
    return (*OPTIONS, f"-I{include_folder()}", f"-arch=sm_{arch}")
