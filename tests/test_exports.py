"""Binaries export pycomm's own names alone, so that they load beside any torch.

A symbol of the C++ library that one of them exports takes the place of the same symbol in the
libraries that are loaded later. Names are read from .dynsym, as the loader does.
"""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

import pycomm
from pycomm import _C, _build
from tests.compiling import ROOT

PACKAGE = Path(pycomm.__file__).parent
# Functions and variables of namespace pycomm; type info, vtables, guards of statics and thunks.
OWN = {
    "library": re.compile(r"_Z(T[ISVT]|GVZ?|Thn\d+_|Z)?NK?6pycomm"),
    "module": re.compile(r"PyInit_\w+$"),
}
SHT_DYNSYM, SYMBOL_BYTES = 11, 24


def exported(binary: Path) -> list[str]:
    """Return the names that a library of 64 bits offers to others."""
    data = binary.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (start,) = struct.unpack_from("<Q", data, 40)  # e_shoff, e_shentsize and e_shnum
    size, count = struct.unpack_from("<HH", data, 58)
    # The parts of a header are sh_name, type, flags, addr, offset, size, link, info.
    headers = [struct.unpack_from("<IIQQQQII", data, start + i * size) for i in range(count)]
    (table,) = (header for header in headers if header[1] == SHT_DYNSYM)
    strings = headers[table[6]][4]
    names = []
    for at in range(table[4], table[4] + table[5], SYMBOL_BYTES):
        name, info, _, section = struct.unpack_from("<IBBH", data, at)
        if section and info >> 4:  # it is defined here, and not local
            first = strings + name
            names.append(data[first : data.index(b"\0", first)].decode())
    return names


def foreign(binary: Path, kind: str) -> list[str]:
    """Return the exported names that are not pycomm's."""
    return [name for name in exported(binary) if not OWN[kind].match(name)]


def test_the_library_exports_pycomms_names_alone():
    library = PACKAGE / "libpycomm.so"
    assert foreign(library, "library") == []
    assert "_ZTIN6pycomm8PeerLostE" in exported(library)


def test_modules_export_their_entry_point_alone():
    torch_module = _build.load_c10d().__file__
    assert torch_module is not None
    assert exported(Path(_C.__file__)) == ["PyInit__C"]
    for binary in (Path(torch_module), *PACKAGE.glob(f"_prebuilt/*/{_build.BINARY}")):
        assert exported(binary) == ["PyInit__c10d"]


@pytest.mark.parametrize(
    ("flag", "refused"), [("-static-libgcc", True), ("-static-libstdc++", False)]
)
def test_configure_refuses_an_unwinder_of_its_own(flag, refused, tmp_path):
    cmake = _build._tool("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    library = PACKAGE / "libpycomm.so"
    options = [
        f"-DPYCOMM_LIBRARY={library}",
        "-DPYCOMM_TORCH=OFF",
        f"-DCMAKE_SHARED_LINKER_FLAGS={flag}",
    ]
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == refused, done.stdout + done.stderr
    assert ("remove -static-libgcc" in done.stderr) == refused
