"""Lookup of the `_c10d` binary that fits the installed torch; compiles it if there is none.

One C++ file of pycomm includes torch, and its binary fits one minor version of torch. A wheel holds
one for each (`_prebuilt/2.13`); a source install builds one if torch can be imported then, which
pip's isolated builds do not allow. Where none fits, `load_c10d` compiles it at first use with the
package's own CMakeLists.txt, in the user's cache folder, and says so on stderr. The ranks of one
machine build it once, one at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from pycomm.env import cache_home
from pycomm.errors import Error
from pycomm.folders import distrust
from pycomm.log import logger, tell

PACKAGE = Path(__file__).parent
BINARY = "_c10d" + importlib.machinery.EXTENSION_SUFFIXES[0]
OLDEST_TORCH = (2, 11)
_loading = threading.Lock()  # a binary that two threads load at once registers its types twice


def _after_fork() -> None:
    global _loading
    _loading = threading.Lock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_after_fork)


def source_root() -> Path:
    """Return the folder of CMakeLists.txt and csrc/: the package, or the checkout around it."""
    return PACKAGE if (PACKAGE / "CMakeLists.txt").exists() else PACKAGE.parent


def why_no_core() -> str:
    """Return why there is no `_C` for this Python, and what to do."""
    others = sorted(path.name for path in PACKAGE.glob("_C.*.so"))
    if others:
        this = sys.implementation.cache_tag
        return (
            f"pycomm is installed for another Python ({others[0]}; this is {this}): install it "
            "with the pip of this Python"
        )
    return (
        f"pycomm is not built: there is no _C in {PACKAGE}. Install a wheel, or build "
        "it with `pip install .`, or `make build` in a checkout"
    )


def load_c10d() -> ModuleType:
    """Import `pycomm._c10d`, the part of pycomm that is compiled against torch.

    Raises:
        Error: torch is too old, a variable of the core has a wrong value, or no binary fits and
            none can be compiled; the text has the compiler's output.
    """
    import torch

    with _loading:
        loaded = sys.modules.get("pycomm._c10d")
        return _load(torch.__version__) if loaded is None else loaded


def _load(version: str) -> ModuleType:
    if minor_of(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise Error(f"torch {version} is too old for pycomm: install torch {oldest} or newer")
    # A binary reads the core's variables while it loads. A wrong one is refused here, where it is
    # not taken for a defect of the binary.
    from pycomm import _C

    _C.env()
    reason = why_none()
    for kind, binary in _delivered(version):
        try:
            return import_c10d(binary)
        except (ImportError, OSError) as error:
            reason = f"the {kind} one does not load: {str(error).splitlines()[0]}"
    folder = _folder_of(version)
    _prepare(folder)
    if not (folder / BINARY).exists():
        with _locked(folder.parent):
            if not (folder / BINARY).exists():  # else another rank has built it
                _compile_aloud(folder, version, reason)
    binary = folder / BINARY
    try:
        return import_c10d(binary)
    except (ImportError, OSError) as error:
        reason = f"{binary} does not load: {str(error).splitlines()[0]}"
        raise Error(f"{reason}; remove that file, and it is compiled again") from None


def minor_of(version: str) -> tuple[int, int]:
    """Return major and minor of a version of torch: (2, 13) of "2.13.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise Error(f"torch says that its version is {version!r}, which is no version")
    return int(found[1]), int(found[2])


def _built_for() -> str | None:
    """Return the version of torch that `_c10d` beside the package was built for, or None."""
    stamp = PACKAGE / "_c10d.torch"
    return stamp.read_text().strip() if stamp.exists() else None


def find_c10d(version: str) -> tuple[str, Path] | None:
    """Return the `_c10d` that `load_c10d` would take for this torch; None: it would compile it.

    The first part says where it comes from: "installed", "prebuilt" or "compiled".
    """
    for delivered in _delivered(version):
        return delivered
    folder = _folder_of(version)
    has_it = (folder / BINARY).exists() and not _distrust(folder)
    return ("compiled", folder / BINARY) if has_it else None


def _delivered(version: str) -> Iterator[tuple[str, Path]]:
    """Yield each `_c10d` for this torch that came with the package, and its kind.

    The wheel's fits all builds of a minor version of torch: what differs between the headers of CPU
    and CUDA builds is not used by it.
    """
    if _built_for() == version:
        yield "installed", PACKAGE / BINARY
    major, minor = minor_of(version)
    binary = PACKAGE / "_prebuilt" / f"{major}.{minor}" / BINARY
    if binary.exists():
        yield "prebuilt", binary


def why_none() -> str:
    """Return why there is no `_c10d` for this torch yet."""
    if built_for := _built_for():
        return f"found one for torch {built_for}"
    found = (path.parent.name for path in PACKAGE.glob(f"_prebuilt/*/{BINARY}"))
    prebuilt = ", ".join(sorted(found, key=minor_of))
    return f"the wheel has it for torch {prebuilt}" if prebuilt else "there is none yet"


def _distrust(folder: Path) -> str:
    """Return why the binary in a folder must not be loaded; "": whoever wrote it is trusted."""
    parts = [path for path in (folder.parent, folder, folder / BINARY) if path.exists()]
    return next(filter(None, map(distrust, parts)), "")


def _folder_of(version: str) -> Path:
    """Return the folder of the `_c10d` that is compiled here for this torch."""
    return cache_home() / "pycomm" / f"_c10d-torch{version}-{_fingerprint()}"


def _fingerprint() -> str:
    """Return a hash of all build inputs but torch: the sources and the interpreter."""
    root = source_root()
    digest = hashlib.sha256(str(sys.implementation.cache_tag).encode())
    headers = sorted((root / "csrc").rglob("*.h"))
    exports = root / "csrc/binding/module.map"
    parts = sorted(root.glob("csrc/binding/torch/*.cpp"))
    for path in [root / "CMakeLists.txt", exports, *headers, *parts]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _prepare(folder: Path) -> None:
    """Make the folder of a build, unless it holds one.

    Raises:
        Error: it cannot be used.
    """
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            path.mkdir(mode=0o755, exist_ok=True)
        why = _distrust(folder)
        writable = os.access(folder, os.W_OK) and os.access(folder.parent, os.W_OK)
        if not why and not writable and not (folder / BINARY).exists():
            why = "it belongs to another user"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise Error(
            f"_c10d must be compiled for this torch, and {folder.parent} cannot be used ({why}): "
            "set XDG_CACHE_HOME to a folder of your own"
        )


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the lock of a place of builds: a compiler takes 2 GB of memory."""
    with open(home / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            logger.warning("another process compiles; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks


def _compile_aloud(folder: Path, version: str, reason: str) -> None:
    """Compile, and say so before and after; the caller holds the lock."""
    logger.warning(
        "compiling _c10d for torch %s (%s); once, takes half a minute to three", version, reason
    )
    start = time.monotonic()
    try:
        _compile(folder)
    except Error as error:
        raise Error(
            f"there is no _c10d for torch {version}: {reason}, and it cannot be compiled: {error}"
        ) from None
    tell(f"built {folder / BINARY} in {time.monotonic() - start:.0f} s")


def _tool(name: str) -> str | None:
    """Return a program's path: on the PATH, or next to the interpreter, where pip puts it."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def missing_tools() -> list[str]:
    """Return what `_c10d` could not be compiled without and is not here."""
    missing = [tool for tool in ("cmake", "ninja") if _tool(tool) is None]
    if not any(map(_tool, ("c++", "g++", "clang++"))):
        missing.append("c++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    return missing if header.exists() else [*missing, str(header)]


def _compile(folder: Path) -> None:
    if missing := missing_tools():
        raise Error(
            f"there is no {', no '.join(missing)}: install a torch that the wheel has a binary "
            f'for, or the tools: pip install "pycomm[compile]" brings cmake and ninja, the system '
            f"a C++ compiler and Python's headers (g++, python3-dev)"
        )
    with tempfile.TemporaryDirectory(prefix="pycomm-") as build:
        cmake, ninja = _tool("cmake"), _tool("ninja")
        configure = [
            str(cmake),
            *("-S", str(source_root()), "-B", build, "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYCOMM_LIBRARY={PACKAGE / 'libpycomm.so'}",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-DPYCOMM_CUDA=OFF",
            "-DPYCOMM_TORCH=ON",
        ]
        _run(configure)
        _run([str(cmake), "--build", build])
        # Renaming is atomic, so no rank ever sees half a file.
        partial = folder / "partial.so"
        shutil.copy(Path(build) / BINARY, partial)
        partial.chmod(0o755)  # the user's umask may let others write
        os.replace(partial, folder / BINARY)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        found = [i for i, line in enumerate(lines) if "error" in line.lower()]
        words = lines[found[0] :][:10] if found else lines[-10:]
        raise Error("\n".join([f"compiling _c10d failed: {' '.join(command)}", *words]))


def import_c10d(binary: Path) -> ModuleType:
    """Import a binary as `pycomm._c10d`, wherever it lies.

    Raises:
        ImportError: it does not load.
    """
    loader = importlib.machinery.ExtensionFileLoader("pycomm._c10d", str(binary))
    spec = importlib.util.spec_from_file_location("pycomm._c10d", binary, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["pycomm._c10d"] = module
    vars(sys.modules["pycomm"])["_c10d"] = module  # as an import statement does
    return module
