"""Lookup of the `_c10d` binary that fits the installed torch; compiles it if there is none.

One C++ file of pycomm includes torch, and its binary fits one version of torch only. `pip install`
builds it if torch can be imported at build time, which pip's isolated builds do not allow.
Otherwise `load_c10d` compiles it at first use with the package's own CMakeLists.txt, beside the
package if that folder is writable, else in ~/.cache/pycomm. The ranks of one machine build it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from pycomm.errors import Error

PACKAGE = Path(__file__).parent
BINARY = "_c10d" + importlib.machinery.EXTENSION_SUFFIXES[0]


def source_root() -> Path:
    """Return the folder of CMakeLists.txt and csrc/: the package, or the checkout around it."""
    return PACKAGE if (PACKAGE / "CMakeLists.txt").exists() else PACKAGE.parent


def load_c10d() -> ModuleType:
    """Import `pycomm._c10d`, the part of pycomm that is compiled against torch.

    Raises:
        Error: It had to be compiled and that failed; the text has the compiler's output.
    """
    import torch

    loaded = sys.modules.get("pycomm._c10d")
    if loaded is not None:
        return loaded
    built_for = c10d_built_for()
    if built_for == torch.__version__:
        return importlib.import_module("pycomm._c10d")

    folder = _folder(_folder_name(torch.__version__))
    binary = folder / BINARY
    if not binary.exists():
        with _locked(folder):
            if not binary.exists():  # else another rank has built it
                reason = f"found one for torch {built_for}" if built_for else "there is none yet"
                _say(f"compiling _c10d for torch {torch.__version__} ({reason}), about 30 s, once")
                _compile(folder)
                _say(f"built {binary}")
    return _import_from(binary)


def c10d_built_for() -> str | None:
    """Return the version of torch that `_c10d` beside the package was built for, or None."""
    stamp = PACKAGE / "_c10d.torch"
    return stamp.read_text().strip() if stamp.exists() else None


def find_c10d(version: str) -> Path | None:
    """Return the `_c10d` that `load_c10d` would take for this torch; None: it would compile it."""
    if c10d_built_for() == version:
        return PACKAGE / BINARY
    found = (home / _folder_name(version) / BINARY for home in _homes())
    return next((binary for binary in found if binary.exists()), None)


def _homes() -> tuple[Path, Path]:
    """Return the two places of builds: beside the package, and the user's cache folder."""
    return PACKAGE / "_built", Path.home() / ".cache" / "pycomm"


def _folder_name(version: str) -> str:
    return f"_c10d-torch{version}-{_fingerprint()}"


def _fingerprint() -> str:
    """Return a hash of all build inputs but torch: the sources and the interpreter."""
    root = source_root()
    digest = hashlib.sha256(str(sys.implementation.cache_tag).encode())
    headers = sorted((root / "csrc").rglob("*.h"))
    for path in [root / "CMakeLists.txt", *headers, *sorted(root.glob("csrc/binding/torch/*.cpp"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _folder(name: str) -> Path:
    """Return a folder of that name that is writable, or that holds another user's build."""
    beside, of_user = (home / name for home in _homes())
    try:
        beside.mkdir(parents=True, exist_ok=True)
    except OSError:
        of_user.mkdir(parents=True, exist_ok=True)
        return of_user
    return beside


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks


def _compile(folder: Path) -> None:
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            raise Error(
                f"_c10d must be compiled for this torch, but there is no {tool}: "
                f"pip install cmake ninja, or install pycomm with --no-build-isolation"
            )
    with tempfile.TemporaryDirectory(prefix="pycomm-") as build:
        configure = [
            "cmake",
            *("-S", str(source_root()), "-B", build, "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYCOMM_LIBRARY={PACKAGE / 'libpycomm.so'}",
            "-DPYCOMM_CUDA=OFF",
            "-DPYCOMM_TORCH=ON",
        ]
        _run(configure)
        _run(["cmake", "--build", build])
        # Renaming is atomic, so no rank ever sees half a file.
        partial = folder / "partial.so"
        shutil.copy(Path(build) / BINARY, partial)
        os.replace(partial, folder / BINARY)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        words = [line for line in lines if "error" in line.lower()][:10] or lines[-10:]
        raise Error("\n".join([f"compiling _c10d failed: {' '.join(command)}", *words]))


def _import_from(binary: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("pycomm._c10d", str(binary))
    spec = importlib.util.spec_from_file_location("pycomm._c10d", binary, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["pycomm._c10d"] = module
    vars(sys.modules["pycomm"])["_c10d"] = module  # as an import statement does
    return module


def _say(text: str) -> None:
    print(f"pycomm: {text}", file=sys.stderr, flush=True)
