"""Child processes of the doctor: each prints lines of JSON, and may crash."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any


def start(*words: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start Python with these words and this environment."""
    command = [sys.executable, *words]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcome(child: subprocess.Popen[str], seconds: float, begin: float) -> tuple[list[Any], str]:
    """Wait for a child, which is ended after so many seconds.

    Args:
        child: a process of `start`.
        seconds: that it has.
        begin: when they began, by `time.monotonic`.

    Returns:
        The values of the lines of JSON that it has printed, and why it has failed, or "".
    """
    late = ""
    try:
        out, cries = child.communicate(timeout=max(0.0, begin + seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        out, cries = child.communicate()
        late = f"did not end within {seconds:.0f} s"
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    code = child.returncode
    last = (cries.strip().splitlines() or ["ended without a word"])[-1]
    crash = f"crashed: {signal.Signals(-code).name}" if code < 0 else last
    return said, late or (crash if code else "")
