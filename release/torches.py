"""Headers and libraries of several versions of torch, to compile `_c10d` against each.

    python -m release.torches FOLDER [--fresh]

downloads the newest release of every minor version for this Python, and unpacks from it what the
compiler and the linker need, as FOLDER/2.13/torch. What is there already is not fetched again. A
minor version that cannot be fetched is left out, and named. `--fresh` removes the
folder first: headers are those of one Python, and cibuildwheel builds for several in one checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
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


def wanted(version: str) -> str:
    """Return pip's text for a minor version, or an exact one: "2.13", "2.13.0", "2.13.0+cpu"."""
    return f"torch=={version}" + ("" if version.count(".") > 1 else ".*")


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return why pip has failed, in one line."""
    said = done.stderr.splitlines()
    # The last one of a conflict names no package.
    errors = [s for s in said if s.startswith("ERROR: ") and "ResolutionImpossible" not in s]
    lines = errors or said or [f"pip exited with {done.returncode}"]
    return lines[-1].removeprefix("ERROR: ")[:200]


def fetch(version: str, folder: Path) -> str:
    """Fetch one version for this Python; return "", or why there is none."""
    if (folder / "torch").exists():
        return ""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        command = [*pip, "--dest", downloads, wanted(version)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        wheels = list(Path(downloads).glob("torch-*.whl"))
        if done.returncode or not wheels:
            return reason_of(done)
        unpack(wheels[0], folder)
        return ""


def fetch_all(folder: Path, versions: Sequence[str] = MINORS) -> list[str]:
    """Fetch all of them; return the versions that are there. The others are named and left out."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for version in versions:
        why = fetch(version, folder / minor_of(version))
        if why:
            tag = sys.implementation.cache_tag
            print(f"release: torch {version} for {tag} is left out, and no _c10d built: {why}")
        else:
            found.append(version)
    if not found:
        raise SystemExit(f"release: no torch of {', '.join(versions)} for this Python")
    return found


def minor_of(version: str) -> str:
    """Return the minor version of one: a _c10d serves all of its releases and builds."""
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    chosen = Path(sys.argv[1]).absolute()
    if "--fresh" in sys.argv[2:]:
        shutil.rmtree(chosen, ignore_errors=True)
    fetch_all(chosen)
