"""Checks of `make gpu`: suites of pytest on the GPU, some of them under compute-sanitizer.

The contract test runs once for every implementation and, where pytest-xdist is installed, on as
many processes as there are cores, since it keeps the host busy and the GPU little.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from pycomm.bench.common import accelerator

CONTRACT = "tests/codecs/test_contract.py"
CONVERT = "tests/codecs/test_convert.py"
RANKS = ("tests/collectives/device/test_gpu.py", "tests/torch/device/test_cuda.py")
"""of collectives, and of DDP and FSDP2, with several ranks on one GPU"""
SANITIZERS = ("memcheck", "racecheck")
SANITIZED = "test_alignment_does_not_matter"  # each codec's kernels, once or twice
PARTS = ("topk", "eden", "sign", "lossless", "mx", "nvfp4", "int", "fp", "others")
"""Parts of a suite, by the codecs in its tests' names, so that a run goes on where one stopped."""
# The project's own options are omitted: they are strict about plugins that may be missing, and
# their time limit of a test is short for Triton's compiler.
OPTIONS = ("-q", "-rs", "--tb=short", "--maxfail=20", "-o", "addopts=", "-o", "timeout=0")
NO_TESTS = 5  # pytest's status
LINES = 100  # that are printed of a suite that fails


@dataclass(frozen=True)
class Suite:
    """A run of pytest, optionally under a tool."""

    name: str
    arguments: Sequence[str]
    tool: Sequence[str] = ()


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


def sanitizer() -> str:
    """Return the path of compute-sanitizer; "" where there is none."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = os.pathsep.join([os.environ.get("PATH", ""), f"{cuda}/bin"])
    return shutil.which("compute-sanitizer", path=places) or ""


def sanitizers(tool: str, part: str, kind: str) -> list[Suite]:
    """Return suites under compute-sanitizer, a path, for a part of native's or nvrtc's kernels."""
    tests = f"{SANITIZED} and {kind}-{accelerator.kind()}{of_part(part)}"
    options = ("--error-exitcode=86", "--print-limit=20")
    return [
        Suite(f"{name} {part}", [CONTRACT, "-k", tests], [tool, f"--tool={name}", *options])
        for name in SANITIZERS
    ]


def status_of(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    out: IO[str] | None = None,
) -> int | None:
    """Run a command and return its status; None: it has taken longer, and was ended with all its
    descendants."""
    process = subprocess.Popen(
        command, env=env, stdout=out, stderr=out and subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(max(seconds, 0.001))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also of an interrupt, which does not reach its session
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def counts(output: str, status: int) -> dict[str, int]:
    """Return how many tests have passed, failed and been skipped, those by design aside.

    A status that no failed test explains counts as one: that of a crash, or of a sanitizer that has
    found something.
    """
    # Tools print more behind it.
    *_, last = ["", *re.findall(r"^\d+ (?:passed|failed|error|skipped).*", output, re.MULTILINE)]
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    found["failed"] = found.get("failed", 0) + found.pop("error", 0)
    designed = re.findall(r"^SKIPPED \[(\d+)\] .*: by design: ", output, re.MULTILINE)
    found["skipped"] = found.get("skipped", 0) - sum(map(int, designed))
    if status not in (0, NO_TESTS) and not found["failed"]:
        found["failed"] = 1
    return {word: n for word, n in found.items() if n}


def run(suite: Suite, seconds: float) -> dict[str, int] | None:
    """Run a suite; print its counts, and the end of its output unless all is well.

    Returns:
        The counts; None: it was not done in so many seconds.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = [*suite.tool, sys.executable, "-m", "pytest", *suite.arguments, *OPTIONS]
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        status = status_of(command, seconds, env=environment, out=log)
        log.seek(0)
        output = log.read()
    found = None if status is None else counts(output, status)
    print(f"{suite.name}: {'out of time' if found is None else spelled(found)}", flush=True)
    if found is None or found.keys() != {"passed"}:
        print("\n".join(output.splitlines()[-LINES:]), flush=True)
    return found


def spelled(found: Mapping[str, int]) -> str:
    """Return counts as text."""
    return ", ".join(f"{n} {word}" for word, n in found.items()) or "no tests"
