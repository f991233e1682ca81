"""Builds the wheel for this Python in dist/: `make wheel`, or `python -m release` in a checkout.

The wheel has libpycomm.so, `_C`, and a `_c10d` for every minor version of torch. It needs glibc
2.28 or newer. On a system whose glibc is newer the binaries are linked against `link_stubs`;
cibuildwheel (pyproject.toml) builds the releases, in containers of that age.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from release import link_stubs, torches

ROOT = Path(__file__).parent.parent
# torch's own libraries are loaded when _c10d is; a wheel must not bring others.
OF_TORCH = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
MEGABYTES = 25


def linking(folder: Path) -> dict[str, str]:
    """Return the variables that make the linker take the old libraries; none on an old system."""
    if tuple(map(int, platform.libc_ver()[1].split("."))) <= link_stubs.NEWEST["GLIBC"]:
        return {}
    link_stubs.write(folder)
    named = "".join(f",-l:{name}" for name in link_stubs.EMPTY)
    flags = ["--exclude-libs,ALL", f"--push-state,--no-as-needed{named},--pop-state"]
    return {"LDFLAGS": " ".join([f"-L{folder}", *(f"-Wl,{flag}" for flag in flags)])}


def main() -> None:
    """Build, repair, check and print."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    roots = ROOT / "build/torches" / tag
    minors = torches.fetch_all(roots)
    scripts = sysconfig.get_path("scripts")
    env = os.environ | {
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYCOMM_TORCHES": str(roots),
        "PYCOMM_CUDA": "OFF",  # kernels are compiled by NVRTC or Triton where they are needed
        **linking(ROOT / "build/link_stubs"),
    }
    made = ROOT / "build/wheel"
    shutil.rmtree(made, ignore_errors=True)
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)  # of former builds, setuptools packs all
    for stale in ROOT.glob("build/lib.*"):
        shutil.rmtree(stale)

    def run(*command: object) -> None:
        subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=env)

    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", made, ROOT)
    (raw,) = made.glob("*.whl")
    audit = [sys.executable, "-m", "auditwheel"]
    excluded = [option for name in OF_TORCH for option in ("--exclude", name)]
    plat = f"manylinux_2_28_{platform.machine()}"
    run(*audit, "repair", "--plat", plat, "--only-plat", *excluded, "-w", ROOT / "dist", raw)
    (wheel,) = (ROOT / "dist").glob(f"pycomm-*-{tag}-{tag}-{plat}.whl")
    run(*audit, "show", wheel)
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.relative_to(ROOT)}: {size:.1f} MB, for torch {', '.join(minors)}")
    if size > MEGABYTES:
        raise SystemExit(f"release: the wheel is larger than {MEGABYTES} MB")


if __name__ == "__main__":
    main()
