"""Probes of parts of the installation, in child processes: loading a wrong binary may crash.

    python -m pycomm.doctor.probe torch c10d triton

prints the facts of each as a line of JSON. `look` runs such processes side by side.
"""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

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

    distributed = torch.distributed.is_available()
    points = metadata.entry_points()
    groups = ("torch.backends", "torch.distributed.backends")
    facts = {
        "version": torch.__version__,
        "distributed": distributed,
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
    facts: Facts = {
        "torch": version,
        "built_for": _build.c10d_built_for() or "",
        "prebuilt_for": _build.c10d_prebuilt_for(),
        "kind": found[0] if found else "",
        "binary": str(found[1]) if found else "",
    }
    if found is None:
        facts["missing"] = _build.missing_tools()
    else:
        _build.import_c10d(found[1])
    return facts


def driver() -> Facts:
    """Return facts on NVIDIA's driver, without torch or the CUDA runtime."""
    cuda = ctypes.CDLL("libcuda.so.1")
    facts: Facts = {"error": cuda.cuInit(0), "version": 0, "gpus": []}
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        facts["version"] = number.value
    if facts["error"] == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
        for index in range(number.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
            cuda.cuDeviceGet(ctypes.byref(device), index)
            cuda.cuDeviceGetName(name, len(name), device)
            facts["gpus"].append(name.value.decode())
    return facts


def triton() -> Facts:
    """Return facts on Triton and on pycomm's kernels in it."""
    import triton

    import pycomm.triton_kernels.quant  # noqa: F401

    return {"version": triton.__version__}


def nvrtc() -> Facts:
    """Return facts on CuPy's compiler, which builds the CUDA kernels where there is no nvcc."""
    import cupy

    major, minor = cupy.cuda.nvrtc.getVersion()
    return {"version": f"{major}.{minor}", "cupy": cupy.__version__}


PROBES: dict[str, Callable[[], Facts]] = {
    probe.__name__: probe for probe in (core, torch, c10d, driver, triton, nvrtc)
}


GROUPS = (("core",), ("torch", "c10d", "triton"), ("driver",), ("nvrtc",))
"""Probes that share a process: three of them import torch, which takes a second or two."""


@dataclass(frozen=True)
class ProbeOutcome:
    """Result of one probe."""

    facts: Facts = field(default_factory=dict)
    error: str = ""
    """Why there are no facts."""
    missing: bool = False
    """True if the part is not installed, as opposed to broken."""


def look(groups: Iterable[Sequence[str]] = GROUPS) -> dict[str, ProbeOutcome]:
    """Run probes, those of a group in one process.

    A crash is attributed to the probe that was running; the probes after it are then run one by
    one in processes of their own.
    """
    started = [(names, _start(names)) for names in groups]
    begin = time.monotonic()
    found: dict[str, ProbeOutcome] = {}
    for names, process in started:
        found |= _outcomes(names, process, SECONDS, begin)
        rest = [name for name in names if name not in found]
        if rest:
            found |= look([[name] for name in rest])
    return found


def _start(names: Sequence[str]) -> subprocess.Popen[str]:
    """Start probes without pycomm's variables, except for those that torch's import reads.

    The variables are checked one by one.
    """
    env = with_only(*ASKED) if "torch" in names else with_only()
    return children.start("-m", __name__, *names, env=env)


def _outcomes(
    names: Sequence[str], process: subprocess.Popen[str], seconds: float, begin: float
) -> dict[str, ProbeOutcome]:
    """Return the outcomes of a process, up to the probe at which it ended."""
    said, why = children.outcome(process, seconds, begin)
    found = {name: ProbeOutcome(**answer) for name, answer in zip(names, said, strict=False)}
    if len(found) < len(names):
        found[names[len(found)]] = ProbeOutcome(error=why or "ended without a word")
    return found


def main(names: Sequence[str]) -> None:
    """Print the facts or the error of each probe."""
    for name in names:
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
    }


if __name__ == "__main__":
    main(sys.argv[1:])
