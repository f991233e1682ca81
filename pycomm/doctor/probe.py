"""Probes of parts of the installation, in child processes: loading a wrong binary may crash.

    python -m pycomm.doctor.probe torch

prints the facts as a line of JSON. `look` runs such processes side by side.
"""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from pycomm._cuda_wheel import driver_version
from pycomm.doctor import children
from pycomm.env import env, with_only
from pycomm.errors import Error

SECONDS = 60.0
AT_IMPORT = ("PYCOMM_RUN", "PYCOMM_TAKEOVER")
"""Variables that change torch when it is imported."""
ASKED = (*AT_IMPORT, "PYCOMM_IMPL")
"""Variables that the probes of torch and of the backend obey."""
Facts = dict[str, Any]


def core() -> Facts:
    """Return facts on `_C` and libpycomm.so."""
    from pycomm import _C

    try:
        tls, tls_error = _C.tls_version(), ""
    except RuntimeError as error:
        tls, tls_error = "", str(error)
    return {
        "simd": _C.simd_level(),
        "cuda": _C.cuda_built(),
        "gpus": _C.device_count(),
        "tls": tls,
        "tls_error": tls_error,
    }


def torch() -> Facts:
    """Return facts on torch, and on what the environment makes pycomm do when it is imported."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch

    points = metadata.entry_points()
    groups = ("torch.backends", "torch.distributed.backends")
    facts = {
        "version": torch.__version__,
        "entry_point": any(e.name == "pycomm" for g in groups for e in points.select(group=g)),
        "cuda": torch.version.cuda or "",
        "gpus": torch.cuda.device_count(),
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
    """Return facts on the binary compiled against torch, or on the tools to compile it."""
    import torch

    from pycomm import _build

    version = torch.__version__
    found = _build.find_c10d(version)
    if found is None:
        why, missing = _build.why_none(), _build.missing_tools()
        return {"torch": version, "binary": "", "why": why, "missing": missing}
    _build.import_c10d(found[1])
    return {"torch": version, "binary": str(found[1]), "kind": found[0]}


def driver() -> Facts:
    """Return facts on NVIDIA's driver, without torch or the CUDA runtime."""
    cuda = ctypes.CDLL("libcuda.so.1")
    facts: Facts = {"error": cuda.cuInit(0), "version": driver_version() or 0, "gpus": []}
    number = ctypes.c_int()
    if facts["error"] == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
        for index in range(number.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
            cuda.cuDeviceGet(ctypes.byref(device), index)
            cuda.cuDeviceGetName(name, len(name), device)
            facts["gpus"].append(name.value.decode())
    return facts


def triton() -> Facts:
    """Load Triton and pycomm's kernels in it."""
    import pycomm.triton_kernels.quant  # noqa: F401

    return {}


def nvrtc() -> Facts:
    """Load CuPy's compiler, which builds the CUDA kernels where there is no nvcc."""
    import cupy

    cupy.cuda.nvrtc.getVersion()
    return {}


PROBES: dict[str, Callable[[], Facts]] = {
    probe.__name__: probe for probe in (core, torch, c10d, driver, triton, nvrtc)
}


@dataclass(frozen=True)
class ProbeOutcome:
    """Result of one probe."""

    facts: Facts = field(default_factory=dict)
    error: str = ""
    """Why there are no facts."""
    missing: bool = False
    """True if the part is not installed, as opposed to broken."""


def look() -> dict[str, ProbeOutcome]:
    """Run all probes side by side, each in a process of its own.

    Of pycomm's variables they see those that the import of torch reads; each is checked by itself.
    """
    started = {}
    for name in PROBES:
        env = with_only(*ASKED) if name in ("torch", "c10d", "triton") else with_only()
        started[name] = children.start("-m", __name__, name, env=env)
    begin = time.monotonic()
    return {name: outcome(process, SECONDS, begin) for name, process in started.items()}


def outcome(process: subprocess.Popen[str], seconds: float, begin: float) -> ProbeOutcome:
    """Return the outcome of a probe's process: `children.outcome` has the arguments."""
    said, why = children.outcome(process, seconds, begin)
    return ProbeOutcome(**said[0]) if said else ProbeOutcome(error=why or "ended without a word")


def main(name: str) -> None:
    """Print the facts of a probe, or its error."""
    answer: Facts = {"facts": {}, "error": "", "missing": False}
    try:
        answer["facts"] = PROBES[name]()
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0] in ("torch", "triton", "cupy")
        answer |= {"error": str(error), "missing": absent}
    except (ImportError, OSError, Error, AttributeError, RuntimeError) as error:
        absent = name == "driver" and "libcuda.so.1: cannot open" in str(error)
        answer |= {"error": f"{error}".strip().splitlines()[0], "missing": absent}
    print(json.dumps(answer), flush=True)


def version(package: str) -> str:
    """Return the version of a package as it is installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def platform_facts() -> dict[str, str]:
    """Return facts that should be equal on all ranks of a job."""
    return {
        "pycomm": version("pycomm"),
        "Python": platform.python_version(),
        "machine": platform.machine(),
        "torch": version("torch"),
    }


if __name__ == "__main__":
    main(sys.argv[1])
