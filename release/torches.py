"""Headers and libraries of several versions of torch, to compile `_c10d` against each.

    python -m release.torches FOLDER [--fresh]

downloads the newest release of every minor version for this Python, and unpacks from it what the
compiler and the linker need, as FOLDER/2.13/torch. What is there already is not fetched again. A
minor version that has no wheel for this Python is left out, and named. `--fresh` removes the
folder first: headers are those of one Python, and cibuildwheel builds for several in one checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
NEEDED = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in LIBRARIES))


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack headers and libraries into folder/torch; half of them are never seen there."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(NEEDED)]
        archive.extractall(partial, names)
    partial.rename(folder)


def fetch(minor: str, folder: Path) -> bool:
    """Fetch one minor version; return whether there is one for this Python."""
    if (folder / "torch").exists():
        return True
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        command = [*pip, "--dest", downloads, f"torch=={minor}.*"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        wheels = list(Path(downloads).glob("torch-*.whl"))
        if done.returncode == 0 and wheels:
            unpack(wheels[0], folder)
            return True
        if "No matching distribution" in done.stderr:
            return False
        raise SystemExit(f"release: torch {minor} could not be fetched:\n{done.stderr}")


def fetch_all(folder: Path) -> list[str]:
    """Fetch all of them; return the minor versions that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [minor for minor in MINORS if fetch(minor, folder / minor)]
    for minor in sorted(set(MINORS) - set(found)):
        print(f"release: no torch {minor} for {sys.implementation.cache_tag}: no _c10d for it")
    if not found:
        raise SystemExit(f"release: no torch of {', '.join(MINORS)} for this Python")
    return found


if __name__ == "__main__":
    chosen = Path(sys.argv[1]).absolute()
    if "--fresh" in sys.argv[2:]:
        shutil.rmtree(chosen, ignore_errors=True)
    fetch_all(chosen)
