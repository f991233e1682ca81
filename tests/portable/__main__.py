"""`make portable`: compiles the core library for aarch64, and tests what other processors make.

It takes g++-aarch64-linux-gnu and qemu-user, and ten minutes at first; later only what has changed
is compiled again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pycomm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/portable"
AARCH64 = FOLDER / "driver-aarch64"
COMPILER = "aarch64-linux-gnu-g++"


def flags() -> list[str]:
    """Return the flags of CMakeLists.txt that decide about bits, and what ranks compare."""
    (found,) = re.findall(r"^set\(CXX_FLAGS (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.M)
    version = f'-DPYCOMM_VERSION="{pycomm.__version__}"'
    return ["-std=gnu++17", "-O1", f"-I{ROOT / 'csrc'}", version, *found.split()]


def compile_aarch64(folders: Sequence[str]) -> None:
    """Compile what is older than any header that it might include, and link the driver."""
    sources = [Path(__file__).parent / "driver.cpp"]
    for folder in folders:
        sources += sorted((ROOT / "csrc" / folder).rglob("*.cpp"))
    newest = max(f.stat().st_mtime for d in folders for f in (ROOT / "csrc" / d).rglob("*.h"))
    FOLDER.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        made = FOLDER / ("_".join(source.relative_to(ROOT).parts) + ".o")
        if not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            command = [COMPILER, *flags(), "-c", str(source), "-o", str(made)]
            subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_one, sources))
    # A static glibc warns that OpenSSL, which TLS loads at run time, needs the same glibc.
    libraries = ["-lpthread", "-ldl", "-Wl,--no-warnings"]
    subprocess.run(
        [COMPILER, "-static", *map(str, objects), *libraries, "-o", str(AARCH64)], check=True
    )


if __name__ == "__main__":
    if shutil.which(COMPILER) is None:
        raise SystemExit(f"there is no {COMPILER}: apt-get install g++-aarch64-linux-gnu qemu-user")
    compile_aarch64(["core", "codecs", "transports", "collectives"])
    tests = [sys.executable, "-m", "pytest", "--quiet", str(Path(__file__).parent)]
    raise SystemExit(subprocess.run(tests, check=False).returncode)
