"""Looks at one part of the installation, in a process of its own: loading a wrong binary may crash.

    python -m pycomm.doctor.probe core

prints its facts as one line of JSON, or ends with a traceback. `look` runs several side by side.
"""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pycomm.env import env, with_only
from pycomm.errors import Error

SECONDS = 60.0
AT_IMPORT = ("PYCOMM_RUN", "PYCOMM_TAKEOVER")
"""what changes torch when it is imported"""
Facts = dict[str, Any]


def core() -> Facts:
    """`_C` and libpycomm.so."""
    from pycomm import _C

    return {"simd": _C.simd_level(), "cuda": _C.cuda_built(), "gpus": _C.device_count()}


def torch() -> Facts:
    """torch itself, and what the environment makes pycomm do when it is imported."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch

    distributed = torch.distributed.is_available()
    points = metadata.entry_points()
    groups = ("torch.backends", "torch.distributed.backends")
    facts = {
        "version": torch.__version__,
        "distributed": distributed,
        "entry_point": any(e.name == "pycomm" for g in groups for e in points.select(group=g)),
        "cuda": torch.version.cuda or "",
        "gpus": torch.cuda.device_count(),
        "nccl": distributed and torch.distributed.is_nccl_available(),
        "no_effect": [
            str(w.message).partition("has no effect: ")[2]
            for w in said
            if "has no effect" in str(w.message)
        ],
    }
    if env().impl:
        facts["impl"] = _implementation_error(env().impl, "cuda" if facts["gpus"] else "cpu")
    return facts


def _implementation_error(kind: str, device: str) -> str:
    from pycomm.codecs.implementations import Unavailable, implementation

    try:
        implementation("quant", kind, device)
    except (ImportError, Unavailable, ValueError) as error:
        return str(error)
    return ""


def c10d() -> Facts:
    """The one binary that is compiled against torch; what would compile it, if it must be."""
    import torch

    from pycomm import _build

    binary = _build.find_c10d(torch.__version__)
    facts: Facts = {"torch": torch.__version__, "built_for": _build.c10d_built_for() or ""}
    if binary is None:
        tools = ["cmake", "ninja", "c++"]
        facts["missing"] = [tool for tool in tools if shutil.which(tool) is None]
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            facts["missing"].append(str(header))
    else:
        _build.load_c10d()
    return facts | {"binary": str(binary or "")}


def driver() -> Facts:
    """NVIDIA's driver, asked without torch or the CUDA runtime."""
    cuda = ctypes.CDLL("libcuda.so.1")
    facts: Facts = {"error": cuda.cuInit(0), "version": 0, "gpus": [], "apart": 0}
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        facts["version"] = number.value
    if facts["error"] == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
        for index in range(number.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
            cuda.cuDeviceGet(ctypes.byref(device), index)
            cuda.cuDeviceGetName(name, len(name), device)
            facts["gpus"].append(name.value.decode())
            for peer in range(index):
                other, reaches = ctypes.c_int(), ctypes.c_int()
                cuda.cuDeviceGet(ctypes.byref(other), peer)
                cuda.cuDeviceCanAccessPeer(ctypes.byref(reaches), device, other)
                facts["apart"] += reaches.value == 0
    return facts


def triton() -> Facts:
    """Triton and our kernels in it."""
    import triton

    import pycomm.triton_kernels.quant  # noqa: F401

    return {"version": triton.__version__}


def nvrtc() -> Facts:
    """CuPy's compiler, which builds the CUDA kernels where there is no nvcc."""
    import cupy

    major, minor = cupy.cuda.nvrtc.getVersion()
    return {"version": f"{major}.{minor}", "cupy": cupy.__version__}


PROBES: dict[str, Callable[[], Facts]] = {
    probe.__name__: probe for probe in (core, torch, c10d, driver, triton, nvrtc)
}


@dataclass(frozen=True)
class Outcome:
    """What one probe has said."""

    facts: Facts = field(default_factory=dict)
    error: str = ""
    """why there are no facts"""
    missing: bool = False
    """it is not installed, as opposed to broken"""


def look(names: Iterable[str] = tuple(PROBES)) -> dict[str, Outcome]:
    """Run probes side by side; without our variables, which are judged one by one."""
    command = [sys.executable, "-m", __name__]
    plain, read_by_torch = with_only(), with_only(*AT_IMPORT, "PYCOMM_IMPL")
    started = {
        name: subprocess.Popen(
            [*command, name],
            env=read_by_torch if name == "torch" else plain,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    deadline = time.monotonic() + SECONDS
    return {name: _outcome(process, deadline) for name, process in started.items()}


def _outcome(process: subprocess.Popen[str], deadline: float) -> Outcome:
    try:
        said, cries = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Outcome(error=f"did not end within {SECONDS:.0f} s")
    if process.returncode < 0:
        return Outcome(error=f"crashed: {signal.Signals(-process.returncode).name}")
    if process.returncode > 0:
        return Outcome(error=(cries.strip().splitlines() or ["ended without a word"])[-1])
    answer = json.loads(said.strip().splitlines()[-1])
    return Outcome(answer["facts"], answer["error"], answer["missing"])


def main(name: str) -> None:
    """Print what a probe has found, or why it could not."""
    answer: Facts = {"facts": {}, "error": "", "missing": False}
    try:
        answer["facts"] = PROBES[name]()
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0] in ("torch", "triton", "cupy")
        answer |= {"error": str(error), "missing": absent}
    except (ImportError, OSError, Error, AttributeError, RuntimeError) as error:
        absent = name == "driver" and "libcuda.so.1: cannot open" in str(error)
        answer |= {"error": f"{error}".strip().splitlines()[0], "missing": absent}
    print(json.dumps(answer))


def platform_facts() -> dict[str, str]:
    """What ranks of one job should have alike."""
    try:
        version = metadata.version("pycomm")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "pycomm": version,
        "Python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
