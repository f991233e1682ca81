"""Builds wheels in dist/: `make wheel` and `make cuda-wheel`, in a checkout.

    python -m release         pycomm, for this Python
    python -m release cuda13  pycomm-cuda13, for every Python; nvcc of CUDA 13 must be there

The first has libpycomm.so, `_C`, and a `_c10d` for every minor version of torch; the second has
another libpycomm.so, with CUDA kernels (pycomm/_cuda_wheel.py). They need glibc 2.28 or newer. On a
system whose glibc is newer the binaries are linked against `link_stubs`; cibuildwheel
(pyproject.toml) builds the releases, in containers of that age.
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
PLATFORM = f"manylinux_2_28_{platform.machine()}"
MEGABYTES = {"pycomm": 25, "pycomm_cuda13": 100}
"""Limits of the sizes; the second is PyPI's."""


def linking(folder: Path) -> dict[str, str]:
    """Return the variables that make the linker take the old libraries; none on an old system."""
    if tuple(map(int, platform.libc_ver()[1].split("."))) <= link_stubs.NEWEST["GLIBC"]:
        return {}
    link_stubs.write(folder)
    named = "".join(f",-l:{name}" for name in link_stubs.EMPTY)
    return {"LDFLAGS": f"-L{folder} -Wl,--push-state,--no-as-needed{named},--pop-state"}


def run(*command: object, **variables: str) -> None:
    """Run a command in the checkout, with the tools of this Python and these variables."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    env = os.environ | {"PATH": path} | variables
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=env)


def build(project: Path, **variables: str) -> Path:
    """Build a project's wheel in dist/, for the platform of releases, and check it."""
    made = ROOT / "build/wheel"
    shutil.rmtree(made, ignore_errors=True)
    for stale in [*project.glob("build/lib"), *project.glob("build/lib.*")]:
        shutil.rmtree(stale)  # setuptools packs all that former builds have left there
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", made, project, **variables, **linking(ROOT / "build/link_stubs"))
    (raw,) = made.glob("*.whl")
    tags = raw.stem.removesuffix(f"-linux_{platform.machine()}")
    audit = [sys.executable, "-m", "auditwheel"]
    excluded = [option for name in OF_TORCH for option in ("--exclude", name)]
    run(*audit, "repair", "--plat", PLATFORM, "--only-plat", *excluded, "-w", ROOT / "dist", raw)
    wheel = ROOT / "dist" / f"{tags}-{PLATFORM}.whl"
    run(*audit, "show", wheel)
    return wheel


def check_size(wheel: Path, text: str) -> None:
    """Print the size of a wheel, and end with an error if it is too large."""
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.relative_to(ROOT)}: {size:.1f} MB, {text}")
    limit = MEGABYTES[wheel.name.partition("-")[0]]
    if size > limit:
        raise SystemExit(f"release: the wheel is larger than {limit} MB")


def main(names: list[str]) -> None:
    """Build, repair, check and print."""
    if names == ["cuda13"]:
        check_size(build(ROOT / "release/cuda13"), "for every Python, with CUDA kernels")
    elif not names:
        roots = ROOT / f"build/torches/cp{sys.version_info.major}{sys.version_info.minor}"
        minors = torches.fetch_all(roots)
        # Without kernels, which pycomm-cuda13 has; else NVRTC or Triton compile them.
        wheel = build(ROOT, PYCOMM_TORCHES=str(roots), PYCOMM_CUDA="OFF")
        check_size(wheel, f"for torch {', '.join(minors)}")
    else:
        raise SystemExit(f"release: there is no wheel {' '.join(names)!r}: want cuda13, or nothing")


if __name__ == "__main__":
    main(sys.argv[1:])
