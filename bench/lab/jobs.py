"""Jobs of a lab's ranks: a module that each runs, and what the first one answers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycomm.bench.lab.base import Lab, wait


class Failed(RuntimeError):
    """A rank failed; the text is what the ranks have printed."""


def ask(lab: Lab, module: str, env: Mapping[str, str] | None = None, **job: Any) -> list[Any]:
    """Run `python -m MODULE JOB` once per node, JOB being JSON, and end the ranks.

    Args:
        lab: the nodes.
        module: its first argument is the job, which also names a new `folder` that the ranks share,
            and a file in it, `log`, to which rank 0 writes lines of JSON.
        env: variables added to this process's.
        job: what the ranks are to know.

    Returns:
        The lines.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        log = Path(folder, "log")
        words = json.dumps(job | {"folder": folder, "log": str(log)})
        command = [sys.executable, "-m", module, words]
        given = dict(os.environ) | dict(env or {})
        status = wait(lab.start(command, env=given, stdout=printed, stderr=printed))
        lab.stop()
        if status != 0 or not log.exists():
            printed.seek(0)
            raise Failed(f"a rank failed:\n{printed.read().decode(errors='replace')}")
        return [json.loads(line) for line in log.read_text().splitlines()]


def answer(log: str, **record: Any) -> None:
    """Write a line to a job's log."""
    with Path(log).open("a") as file:
        print(json.dumps(record), file=file, flush=True)
