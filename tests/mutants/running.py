"""Running the tests of a mutant, with a limit, and without leaving a process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.staged import Staged

Outcome = Literal["passed", "failed", "hung", "nothing"]
MARK = "MUTANT_RUN"
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # exit statuses of pytest


@dataclass(frozen=True)
class Ran:
    """What tests have said."""

    outcome: Outcome
    seconds: float
    by: str
    """The first test that failed."""
    output: str


def run(staged: Staged, tests: Iterable[str], limit: float) -> Ran:
    """Run tests in the copy, as it is, until the first fails."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="pycomm-mutant-") as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        begin = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *tests],
                cwd=staged.folder,
                env=staged.environment({MARK: mark, "TMPDIR": folder}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process, mark)
        seconds = time.monotonic() - begin
        output = log.read_text(errors="replace")
        return Ran(_outcome(status, output), seconds, _by(output), output)


def _outcome(status: int | None, output: str) -> Outcome:
    if status is None:
        return "hung"
    if status == PASSED:
        # All tests were left out: nothing was shown.
        return "passed" if re.search(r"\b[1-9]\d* passed", output) else "nothing"
    # A process that crashed has failed, too.
    return "failed" if status in (FAILED, INTERRUPTED) or status < 0 or status > 5 else "nothing"


def _by(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1] if found else ""


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the run's processes: those of its session, and those that have left it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    ours = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and ours in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
