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

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/portable"
AARCH64 = FOLDER / "driver-aarch64"
RANK_AARCH64 = FOLDER / "rank-aarch64"
COMPILER = "aarch64-linux-gnu-g++"


def flags() -> list[str]:
    """Return the flags that decide about bits, as CMakeLists.txt has them."""
    (found,) = re.findall(r"^set\(CXX_FLAGS (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.M)
    return ["-std=gnu++17", "-O1", f"-I{ROOT / 'csrc'}", *found.split()]


def compile_aarch64(source: str, folders: Sequence[str], made: Path) -> None:
    """Compile what is older than any header that it might include, and link a program."""
    sources = [Path(__file__).parent / source]
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
        [COMPILER, "-static", *map(str, objects), *libraries, "-o", str(made)], check=True
    )


if __name__ == "__main__":
    if shutil.which(COMPILER) is None:
        raise SystemExit(f"there is no {COMPILER}: apt-get install g++-aarch64-linux-gnu qemu-user")
    compile_aarch64("driver.cpp", ["core", "codecs"], AARCH64)
    layers = ["core", "codecs", "transports", "collectives"]
    compile_aarch64("rank.cpp", layers, RANK_AARCH64)
    tests = [sys.executable, "-m", "pytest", "--quiet", str(Path(__file__).parent)]
    raise SystemExit(subprocess.run(tests, check=False).returncode)
