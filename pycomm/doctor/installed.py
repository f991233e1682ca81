"""Checks of what is built and loads: the core, torch and the binary for it, CUDA, Triton, NVRTC."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pycomm._build import OLDEST_TORCH, PACKAGE
from pycomm.doctor.finding import Finding, Topic
from pycomm.doctor.probe import ProbeOutcome

TOPIC = Topic("installed")
BUILD = "build it with `pip install --no-build-isolation .`, or `make build` in a checkout"
KERNELS = "pip install pycomm-cuda13, or build pycomm where nvcc is found"
CUPY = 'pip install "pycomm[cuda13]" (or cuda12, as the driver has it)'


def judge(found: Mapping[str, ProbeOutcome]) -> list[Finding]:
    """Return findings from the outcomes of the probes."""
    return [
        *_core(found["core"]),
        *_torch(found["torch"]),
        *_c10d(found["c10d"], found["torch"]),
        *_cuda(found),
        *_compilers(found),
    ]


def _core(core: ProbeOutcome) -> Iterator[Finding]:
    if core.error:
        yield TOPIC.problem("core", f"does not load: {core.error}", BUILD)
        return
    simd = core.facts["simd"]
    if simd == "default" and platform.machine() == "x86_64":
        yield TOPIC.note(
            "core",
            "loads; this processor has no AVX2, so codecs run at a fraction of their speed",
            "prefer machines with AVX2 (x86-64-v3) or AVX-512 for ranks that compress",
        )
    else:
        yield TOPIC.ok("core", f"loads; SIMD level {simd}")
    if core.facts.get("tls"):
        yield TOPIC.ok("encryption", f"{core.facts['tls']} is there for PYCOMM_TLS=on")
    elif core.facts.get("tls_error"):
        yield TOPIC.note("encryption", core.facts["tls_error"])


def _torch(torch: ProbeOutcome) -> Iterator[Finding]:
    if torch.error:
        oldest = ".".join(map(str, OLDEST_TORCH))
        text = "is not installed" if torch.missing else f"does not load: {torch.error}"
        yield TOPIC.problem(
            "torch",
            f"{text}; the backend and compression need it",
            f"install torch {oldest} or newer: https://pytorch.org/get-started",
        )
        return
    version = torch.facts["version"]
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield TOPIC.problem("torch", f"{version} is too old", f"install torch {oldest} or newer")
    else:
        yield TOPIC.ok("torch", version)
    if not torch.facts["entry_point"]:
        yield TOPIC.warning(
            "entry point",
            'torch does not find the backend "pycomm" by itself: the package is only on the path',
            f"import pycomm.backend before init_process_group, or install the package: {BUILD}",
        )


def _c10d(c10d: ProbeOutcome, torch: ProbeOutcome) -> Iterator[Finding]:
    if torch.error:
        return
    name = "_c10d"
    if c10d.error:
        yield TOPIC.problem(
            name,
            f"does not load: {c10d.error}",
            f"remove the file, or {PACKAGE / '_c10d.torch'} if it is the package's own, and it is "
            f"compiled at its next use; or {BUILD}",
        )
        return
    facts = c10d.facts
    if facts["binary"]:
        of = {"installed": "built by the installation", "prebuilt": "the wheel's prebuilt one"}
        how = of.get(facts["kind"], f"compiled at first use, in {Path(facts['binary']).parent}")
        yield TOPIC.ok(name, f"fits torch {facts['torch']}, and loads: {how}")
        return
    text = f"none fits torch {facts['torch']}: {facts['why']}"
    if facts["missing"]:
        yield TOPIC.problem(
            name,
            f"{text}, and cannot be compiled here: there is no {', '.join(facts['missing'])}",
            'install them: `pip install "pycomm[compile]"` for cmake and ninja, and a C++ compiler '
            "and Python's headers from the system (g++, python3-dev)",
        )
    else:
        yield TOPIC.warning(
            name,
            f"{text}: the first process group will wait until it is compiled, half a minute to "
            "three",
            f"compile it now: {sys.executable} -c "
            "'from pycomm._build import load_c10d; load_c10d()'",
        )


def _cuda(found: Mapping[str, ProbeOutcome]) -> Iterator[Finding]:
    driver, torch, core = found["driver"], found["torch"], found["core"]
    name = "CUDA"
    if driver.error or driver.facts["error"] or not driver.facts["gpus"]:
        yield _no_gpu(driver)
        return
    gpus, version = driver.facts["gpus"], driver.facts["version"]
    text = f"{len(gpus)} GPUs ({', '.join(sorted(set(gpus)))})" if len(gpus) > 1 else gpus[0]
    driver_is = f"driver for CUDA {version // 1000}.{version % 1000 // 10}"
    if not torch.error and not torch.facts["cuda"]:
        yield TOPIC.warning(
            name,
            f"{text}, {driver_is}, but this torch is built without CUDA",
            "install a build of torch for CUDA to use them; nothing, if training is on the CPU",
        )
        return
    if not torch.error and torch.facts["gpus"] < len(gpus):
        yield TOPIC.problem(
            name,
            f"{text}, {driver_is}, of which torch {torch.facts['version']} sees "
            f"{torch.facts['gpus']}",
            f"install a torch for this driver: it is built for CUDA {torch.facts['cuda']}",
        )
        return
    yield TOPIC.ok(name, f"{text}, {driver_is}")
    yield _kernels(core, found["nvrtc"], found["triton"])


def _no_gpu(driver: ProbeOutcome) -> Finding:
    advice = "nothing, if there should be no GPU; else install NVIDIA's driver, or start the "
    advice += "container with its GPUs (docker run --gpus all)"
    if driver.missing:
        return TOPIC.note("CUDA", "there is no NVIDIA driver: ranks are on the CPU", advice)
    if driver.error:
        return TOPIC.problem("CUDA", f"the driver does not load: {driver.error}", advice)
    if driver.facts["error"] not in (0, 100):  # 100: no device
        text = f"the driver answers with error {driver.facts['error']}"
        return TOPIC.problem("CUDA", text, "look into `nvidia-smi` and the kernel's log")
    return TOPIC.note(
        "CUDA",
        "there is a driver and no GPU that this process may use",
        "look at CUDA_VISIBLE_DEVICES and at the container's options, if there should be one",
    )


def _kernels(core: ProbeOutcome, nvrtc: ProbeOutcome, triton: ProbeOutcome) -> Finding:
    """Return the finding on the implementation that runs codecs on the available GPU."""
    name = "CUDA kernels"
    if not core.error and core.facts["cuda"]:
        if core.facts["gpus"]:
            return TOPIC.ok(name, "are compiled into the core")
        return TOPIC.warning(
            name,
            "are compiled into the core, whose CUDA runtime finds no GPU",
            "use a driver that is not older than the toolkit that compiled them (CUDA 13 for "
            "pycomm-cuda13), or build pycomm with an older one",
        )
    if not nvrtc.error:
        text = "are compiled at first use, by NVRTC; GPUs of a host talk through pinned memory"
    elif not triton.error:
        text = "are Triton's, of cast, quant and sign; GPUs of a host talk through pinned memory"
    else:
        return TOPIC.warning(
            name,
            "are absent: codecs of CUDA tensors run as plain torch, which is slow",
            f"{KERNELS}, or {CUPY}",
        )
    return TOPIC.note(name, text, f"{KERNELS}, for the fast way")


def _compilers(found: Mapping[str, ProbeOutcome]) -> Iterator[Finding]:
    """Yield findings on what compiles kernels at their first use, where it is broken."""
    for name, probe, cure in (
        ("Triton", "triton", "install the version that this torch asks for, or remove it"),
        ("NVRTC", "nvrtc", CUPY),
    ):
        if found[probe].error and not found[probe].missing:
            yield TOPIC.warning(name, f"does not load: {found[probe].error}", cure)
