"""The wheel pycomm-cuda13, whose libpycomm.so with CUDA kernels takes the place of the package's.

`import pycomm` loads it if it is installed. That is enough: `_C` and `_c10d` need a library by the
name libpycomm.so, and the loader of the system takes one that the process has already. The two
must be made from the same headers, of which either wheel has a hash in a file beside its library.
At its top level only the standard library is used, since setup.py and release/cuda13 run this file,
too.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from importlib.util import find_spec
from pathlib import Path

NAME = "pycomm-cuda13"
STAMP = "libpycomm.headers"
DRIVER = 13000
"""The oldest driver on which its CUDA runtime runs, as cuDriverGetVersion tells it."""
PACKAGE = Path(__file__).parent


def hash_of_headers(csrc: Path) -> str:
    """Return a hash of the headers in csrc, on which every binary of pycomm depends."""
    digest = hashlib.sha256()
    for path in sorted(csrc.rglob("*.h")):
        digest.update(f"{path.relative_to(csrc)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def installed() -> Path | None:
    """Return the folder of the installed wheel's library, or None."""
    spec = find_spec("pycomm_cuda13")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def why_not(folder: Path, package: Path = PACKAGE) -> str:
    """Return why the library in that folder cannot take the place of the package's; "": it can."""
    stamps = [place / STAMP for place in (folder, package)]
    if not all(map(Path.exists, stamps)) or stamps[0].read_text() != stamps[1].read_text():
        return (
            f"it is of another build than this pycomm: install the {NAME} of the same version, "
            f"or compile the kernels with pycomm (PYCOMM_CUDA=ON) and uninstall {NAME}"
        )
    version = driver_version()
    if version is not None and version < DRIVER:
        return (
            f"NVIDIA's driver here is for CUDA {version // 1000}.{version % 1000 // 10}, and the "
            f'library needs one for CUDA 13: pip install "pycomm[cuda12]" compiles the kernels '
            f"for this driver at first use"
        )
    return ""


def driver_version() -> int | None:
    """Return the version of NVIDIA's driver, 13000 for CUDA 13.0; None: there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    return number.value if driver.cuDriverGetVersion(ctypes.byref(number)) == 0 else None


def load() -> None:
    """Load the library if the wheel is installed; warn, and leave it, if it does not fit."""
    folder = installed()
    if folder is None:
        return
    why, library = why_not(folder), folder / "libpycomm.so"
    if not why:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            why = f"it does not load: {error}"
    if why:
        warnings.warn(f"{NAME} is installed and not used: {why}", RuntimeWarning, stacklevel=2)
