"""Runs single tests of PyTorch's suite and says how each ended.

A `Runner` keeps one server process that has imported torch and the suite; for each test that
process forks the ranks, so a test does not pay for the import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conformance.suite import Config, load

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How one test ended: "pass", "fail", "timeout" or "skip", and why."""

    test: str
    status: str
    seconds: float
    reason: str = ""  # one line
    detail: str = ""  # tracebacks of the ranks


class Runner:
    """Use as a context: `with Runner(Config("pycomm", 2), log) as runner: runner.run("test_x")`."""

    def __init__(self, config: Config, log: Path) -> None:
        """What the ranks print goes to the file `log`."""
        self.config = config
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("ab") as sink:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.runner", json.dumps(asdict(config))],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        self.names: list[str] = self._answer()

    def run(self, test: str) -> Outcome:
        """Run one test on all ranks."""
        assert self._server.stdin is not None
        self._server.stdin.write(test + "\n")
        self._server.stdin.flush()
        return Outcome(**self._answer())

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of {self.config} died; see its log")
        return json.loads(line)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.kill()
        self._server.communicate()


def _run(suite: type[unittest.TestCase], test: str) -> Outcome:
    case, result, start = suite(test), unittest.TestResult(), time.monotonic()
    case.run(result)
    seconds = round(time.monotonic() - start, 2)
    if result.skipped:
        # "subprocess level" is torch's word for: a rank has skipped, and knows why.
        reason = getattr(case, "worker_skip_reason", None) or result.skipped[0][1]
        return Outcome(test, "skip", seconds, reason)
    for _, text in result.failures + result.errors:
        status = "timeout" if "terminated or timed out after" in text else "fail"
        return Outcome(test, status, seconds, _last_error(text), text[-6000:])
    if result.unexpectedSuccesses:
        return Outcome(test, "fail", seconds, "was expected to fail and did not")
    return Outcome(test, "pass", seconds)


def _last_error(text: str) -> str:
    """The line of a traceback that names the error, of the first rank that had one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        kind, separator, _ = line.partition(": ")
        is_error = kind.replace(".", "").replace("_", "").isalnum() and kind.endswith(
            ("Error", "Exception", "Timeout", "Lost", "Mismatch")
        )
        if separator and is_error and "exited with error code" not in line:
            return line[:300]
    return lines[-1][:300] if lines else ""


def serve(config: Config) -> None:
    """Answer with all names, then with one outcome for each name that is asked for."""
    # Only the answers go to our standard output; what ranks print goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    suite = load(config)
    suite.setUpClass()
    print(json.dumps(sorted(n for n in dir(suite) if n.startswith("test"))), file=answers)
    for line in sys.stdin:
        print(f"\n===== {line.strip()}", flush=True)
        print(json.dumps(asdict(_run(suite, line.strip()))), file=answers)


if __name__ == "__main__":
    serve(Config(**json.loads(sys.argv[1])))
