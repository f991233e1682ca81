"""Builds the fuzz targets under ASan and UBSan and runs each over its corpus.

    python -m tests.fuzz --minutes 10 --seed 1

With clang the targets are libFuzzer's, with gcc standalone.cpp mutates the corpus. A finding ends
its target: the input is kept, and running the target on that file alone shows it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLANG = shutil.which("clang++") is not None
BUILD = ROOT / "build" / ("fuzz-clang" if CLANG else "fuzz-gcc")
TARGETS = ("decoders", "frames", "handshake", "messages")


def build() -> None:
    """Compile the targets."""
    options = ["-DPYCOMM_FUZZ=ON", "-DPYCOMM_SANITIZE=address,undefined"]
    options += ["-DPYCOMM_TORCH=OFF", "-DPYCOMM_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    if CLANG:
        options.append("-DCMAKE_CXX_COMPILER=clang++")
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "fuzz"], check=True)


def command(target: str, seconds: float, seed: int) -> list[str]:
    corpus = str(HERE / "corpus" / target)
    program = str(BUILD / f"fuzz_{target}")
    if not CLANG:
        return [program, corpus, "--seconds", str(seconds), "--seed", str(seed)]
    found = BUILD / f"corpus-{target}"  # the committed corpus stays as it is
    found.mkdir(exist_ok=True)
    limits = [f"-max_total_time={int(seconds)}", f"-seed={seed}", "-print_final_stats=1"]
    return [program, str(found), corpus, *limits]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (1)")
    options = parser.parse_args()
    build()
    environment = dict(os.environ) | {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    failed = 0
    for target in TARGETS:
        seconds = options.minutes * 60 / len(TARGETS)
        print(f"{target}:", flush=True)
        run = subprocess.run(command(target, seconds, options.seed), cwd=BUILD, env=environment)
        failed += run.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
