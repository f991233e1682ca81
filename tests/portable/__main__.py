"""`make portable`: compiles core and codecs for aarch64, and tests what other processors make.

It takes g++-aarch64-linux-gnu and qemu-user, and two minutes at first; later only what has changed
is compiled again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/portable"
AARCH64 = FOLDER / "driver-aarch64"
COMPILER = "aarch64-linux-gnu-g++"


def flags() -> list[str]:
    """Return the flags that decide about bits, as CMakeLists.txt has them."""
    (found,) = re.findall(r"^set\(CXX_FLAGS (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.M)
    return ["-std=gnu++17", "-O1", f"-I{ROOT / 'csrc'}", *found.split()]


def compile_aarch64() -> None:
    """Compile what is older than any source that it might include, and link the driver."""
    sources = [Path(__file__).parent / "driver.cpp"]
    for folder in ("core", "codecs"):
        sources += sorted((ROOT / "csrc" / folder).rglob("*.cpp"))
    newest = max(
        f.stat().st_mtime for d in ("core", "codecs") for f in (ROOT / "csrc" / d).rglob("*.h")
    )
    FOLDER.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        made = FOLDER / ("_".join(source.relative_to(ROOT).parts) + ".o")
        if not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            command = [COMPILER, *flags(), "-c", str(source), "-o", str(made)]
            subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_one, sources))
    subprocess.run(
        [COMPILER, "-static", *map(str, objects), "-lpthread", "-o", str(AARCH64)], check=True
    )


if __name__ == "__main__":
    if shutil.which(COMPILER) is None:
        raise SystemExit(f"there is no {COMPILER}: apt-get install g++-aarch64-linux-gnu qemu-user")
    compile_aarch64()
    tests = [sys.executable, "-m", "pytest", "--quiet", str(Path(__file__).parent)]
    raise SystemExit(subprocess.run(tests, check=False).returncode)
