"""Checks that `make gpu` runs before timing: pytest suites on cuda, and two sanitizers.

The contract test runs once for every implementation and, where pytest-xdist is installed, on as
many processes as there are cores, since it keeps the host busy and the GPU little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pycomm.bench.common import accelerator

CONTRACT = "tests/codecs/test_contract.py"
CONVERT = "tests/codecs/test_convert.py"
RANKS = ("tests/collectives/device/test_gpu.py", "tests/torch/device/test_cuda.py")
SANITIZERS = ("memcheck", "racecheck")
SANITIZED = "test_alignment_does_not_matter"  # each codec's kernels, once or twice
PARTS = ("topk", "eden", "sign", "lossless", "mx", "nvfp4", "int", "fp", "others")
"""Parts of a suite, by the codecs in its tests' names, so that a run goes on where one stopped."""
NO_TESTS = 5  # pytest's status
SECONDS = 300  # for one suite
LINES = 100  # that are printed of one that fails


@dataclass(frozen=True)
class Counts:
    """The counts of a pytest run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        parts = [f"{n} {name}" for name, n in dataclasses.asdict(self).items() if n]
        return ", ".join(parts) or "no tests"

    @property
    def good(self) -> bool:
        return self.passed > 0 and self.failed == 0 and self.skipped == 0


@dataclass(frozen=True)
class Suite:
    """A run of pytest, optionally under a tool."""

    name: str
    arguments: Sequence[str]
    tool: Sequence[str] = ()

    def start(self, folder: Path) -> tuple[subprocess.Popen[bytes], Path, Path]:
        stem = self.name.replace(" ", "-")
        junit, log = folder / f"{stem}.xml", folder / f"{stem}.log"
        # The project's own options are omitted: they are strict about plugins that may be missing,
        # and their time limit of a test is short for Triton's compiler.
        plain = ["-q", "--tb=short", "--maxfail=20", "-o", "addopts=", "-o", "timeout=0"]
        plain.append(f"--junitxml={junit}")
        command = [*self.tool, sys.executable, "-m", "pytest", *self.arguments, *plain]
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TRITON_INTERPRET": "0"},
                start_new_session=True,  # to end it together with its ranks
            )
        return process, junit, log


def of_part(part: str) -> str:
    """Return what selects the tests of a part, each of which is in one part."""
    before = PARTS[: PARTS.index(part)]
    words = [f"not {name}" for name in before] + ([part] if part != "others" else [])
    return " and " + " and ".join(words)


def contract(kind: str, part: str) -> Suite:
    """Return a part of the contract test of an implementation."""
    cores = len(os.sched_getaffinity(0))
    split = ["-n", str(cores)] if cores > 1 and importlib.util.find_spec("xdist") else []
    tests = f"{kind}-{accelerator.kind()}{of_part(part)}"
    return Suite(f"contract {kind} {part}", [CONTRACT, CONVERT, "-k", tests, *split])


def ranks() -> list[Suite]:
    """Return suites for collectives, and for DDP and FSDP2, with several ranks on one GPU."""
    return [Suite(Path(file).stem, [file]) for file in RANKS if Path(file).exists()]


@cache
def sanitizer() -> tuple[str, str]:
    """Return the path of compute-sanitizer, or why it cannot be used."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = os.pathsep.join([os.environ.get("PATH", ""), f"{cuda}/bin"])
    tool = shutil.which("compute-sanitizer", path=places)
    if not tool:
        return "", "compute-sanitizer is not on the PATH"
    # Some virtual machines do not allow it to access the GPU.
    code = f"import torch; torch.zeros(1, device={accelerator.kind()!r})"
    command = [tool, sys.executable, "-c", code]
    try:
        trial = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return "", "compute-sanitizer took more than 60 s for one small tensor"
    if "Device not supported" in trial.stdout + trial.stderr:
        return "", "compute-sanitizer says that it does not support this device"
    return tool, ""


def sanitizers(tool: str, part: str, kind: str) -> list[Suite]:
    """Return compute-sanitizer suites for the kernels of a part.

    Args:
        tool: its path.
        part: one of PARTS.
        kind: of implementation, native or nvrtc.
    """
    tests = f"{SANITIZED} and {kind}-{accelerator.kind()}{of_part(part)}"
    options = ("--error-exitcode=86", "--print-limit=20")
    return [
        Suite(f"{name} {part}", [CONTRACT, "-k", tests], [tool, f"--tool={name}", *options])
        for name in SANITIZERS
    ]


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process, which leads a session, and its descendants; return its status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def counts_of(junit: Path) -> Counts:
    """Read a JUnit report; a missing report is a failure. Intended skips are not counted."""
    if not junit.exists():
        return Counts(failed=1)
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    reasons = [skip.attrib.get("message", "") for skip in suite.iter("skipped")]
    designed = sum(reason.startswith("by design: ") for reason in reasons)
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return Counts(total - failed - skipped, failed, skipped - designed)


def run(suite: Suite, deadline: float = float("inf")) -> Counts | None:
    """Run a suite; print its result, and the end of its output if it fails.

    If all tests pass but the process exits non-zero, one more failure is counted: sanitizers report
    this way. A suite that takes longer than `SECONDS` is ended with all its child processes, and
    counts as failed; None: it was not done by the deadline (of ``time.monotonic()``).
    """
    limit = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        process, junit, log = suite.start(Path(folder))
        try:
            status = process.wait(max(min(deadline, limit) - time.monotonic(), 0.001))
        except subprocess.TimeoutExpired:
            print(f"{suite.name}: out of time", flush=True)
            status = end(process)
            if deadline < limit:
                return None
        counts = counts_of(junit)
        if status not in (0, NO_TESTS) and counts.failed == 0:
            counts = dataclasses.replace(counts, failed=1)
        print(f"{suite.name}: {counts}", flush=True)
        if not counts.good:
            print("\n".join(log.read_text(errors="replace").splitlines()[-LINES:]), flush=True)
    return counts
