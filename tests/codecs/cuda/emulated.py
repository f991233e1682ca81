"""The CUDA kernels of the codecs on the CPU: compiled by g++, each block as 256 coroutines.

This tests kernels, launches and the .cu files' tables without a GPU, but neither their speed nor
nvcc's code. The implementation has the interface of those of pycomm.codecs.base.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

import pycomm
from pycomm._C import Launch, recorded
from pycomm.codecs import CODECS
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.cuda.sources import check_library, include_folder, source_file
from tests.codecs.cases import ROTATIONS, SPECS
from tests.compiling import GENERATED, compile_cpp

# A unique symbol would be one for all libraries of a process: their tables would be one, too.
FLAGS = (
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"),
    "-fno-gnu-unique",
)


def kernels(specs: Sequence[str] = tuple(SPECS + ROTATIONS)) -> list[str]:
    """Return the names of every kernel that these codecs launch."""
    names: dict[str, None] = {}
    for codec in map(pycomm.codec, specs):
        x = torch.zeros(4 * codec.granule or 1000)
        scratch = torch.empty(codec.native.scratch_bytes(x.numel()), dtype=torch.uint8)
        payload = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
        launches = []
        for flag in (False, True):
            residual = x if flag else None
            args = EncodeArgs(x, payload, residual, residual, RandomKey(), 0)
            launches += encode_launches(codec, args, scratch)
            launches += decode_launches(codec, payload, x, scratch, add=flag)
        names |= dict.fromkeys(launch.kernel for launch in launches)
    return list(names)


def encode_launches(codec: Codec, args: EncodeArgs, scratch: torch.Tensor) -> list[Launch]:
    """Return the launches that do ``Codec.encode``."""
    addresses, at = args.addresses(), scratch.data_ptr()
    return recorded(lambda: codec.native.encode(**addresses, stream=0, scratch=at))


def decode_launches(
    codec: Codec, payload: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> list[Launch]:
    """Return the launches that do ``Codec.decode`` or ``Codec.decode_add``."""
    decode, at = codec.native.decode_add if add else codec.native.decode, scratch.data_ptr()
    return recorded(
        lambda: decode(payload.data_ptr(), out.data_ptr(), out.numel(), stream=0, scratch=at)
    )


def encode(codec: Codec, args: EncodeArgs) -> None:
    with guarded(codec.native.scratch_bytes(args.x.numel())) as scratch:
        run(encode_launches(codec, args, scratch), all_kernels())


def decode(codec: Codec, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    with guarded(codec.native.scratch_bytes(out.numel())) as scratch:
        run(decode_launches(codec, payload, out, scratch, add=add), all_kernels())


GUARD, UNSET = 4096, 0xA5


@contextmanager
def guarded(count: int) -> Iterator[torch.Tensor]:
    """Lend memory that is not zeroed; what kernels write next to it would be another's.

    Raises:
        AssertionError: the memory before or behind it was written.
    """
    whole = torch.full((GUARD + count + GUARD,), UNSET, dtype=torch.uint8)
    yield whole[GUARD : GUARD + count]
    written = (torch.cat((whole[:GUARD], whole[GUARD + count :])) != UNSET).sum().item()
    assert not written, f"kernels wrote {written} bytes beyond {count} of scratch memory"


def run(launches: list[Launch], compiled: ctypes.CDLL) -> None:
    for launch in launches:
        size = ctypes.c_size_t(len(launch.params))
        wrong = compiled.run(launch.kernel.encode(), launch.blocks, launch.params, size)
        assert wrong != 1, f"{launch.kernel} is not in the table of {launch.source}.cu"
        assert not wrong, f"{launch.kernel} has a struct of another size"


@cache
def all_kernels() -> ctypes.CDLL:
    """Return the kernels of all .cu files, which are compiled once for the sources as they are.

    Raises:
        Error: libpycomm.so, which makes their arguments, is of other sources.
    """
    check_library()
    files = [source_file(name) for name in (*CODECS, "convert", "feedback", "moments")]
    digest = hashlib.sha256()
    for source in sorted(p for p in include_folder().rglob("*") if p.suffix in (".h", ".cu")):
        digest.update(source.read_bytes())
    for ours in (Path(__file__), Path(__file__).with_name("emulated.h")):
        digest.update(ours.read_bytes())
    GENERATED.mkdir(parents=True, exist_ok=True)
    with (GENERATED / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compiled(files, keep=GENERATED / f"kernels-{digest.hexdigest()[:16]}.so")


def compiled(
    files: Sequence[Path], folder: Path | None = None, keep: Path | None = None
) -> ctypes.CDLL:
    """Compile .cu files of csrc (or of another ``folder``) for the CPU, in a second or more.

    Args:
        files: the .cu files.
        folder: the folder of their headers.
        keep: place of the library; if it is there, it is not compiled again.
    """
    lines = ['#include "emulated.h"', *(f'#include "{file}"' for file in files)]
    with tempfile.TemporaryDirectory() as temporary:
        binary = keep or Path(temporary, "kernels.so")
        if not binary.exists():
            # Its name belongs to its text: another process may compile the same, or something else.
            text = "\n".join(lines) + "\n"
            file = GENERATED / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_suffix(f".{os.getpid()}")
                partial.write_text(text)
                partial.replace(file)
            include = (f"-I{Path(__file__).parent}", f"-I{folder or include_folder()}")
            whole = binary.with_suffix(f".{os.getpid()}")
            compile_cpp(file, whole, *FLAGS, *include, link=["-shared"])
            whole.replace(binary)
        library = ctypes.CDLL(str(binary))
    library.listed.restype = ctypes.c_char_p
    return library


def listed(library: ctypes.CDLL) -> list[str]:
    """Return the names of all kernels in the tables of a library's .cu files."""
    text: bytes = library.listed()
    return text.decode().split("\n")[:-1]
