"""Jobs of a lab's ranks: a command that each runs, and what the first one answers."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.lab.base import Lab, wait


class Failed(RuntimeError):
    """A rank failed; the text is what the ranks have printed."""


def run(
    lab: Lab,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    limit: float = math.inf,
    watch: Callable[[], object] = lambda: None,
    ranks_per_node: int = 1,
) -> None:
    """Run a command once per rank, and end the ranks.

    Args:
        lab: the nodes.
        command: of each rank.
        env: variables added to this process's.
        limit: seconds until all must have ended.
        watch: called repeatedly while they run.
        ranks_per_node: of each node.

    Raises:
        Failed: a rank failed, or has not ended in time.
    """
    until = time.monotonic() + limit
    with tempfile.TemporaryFile() as printed:

        def fail(what: str) -> Failed:
            printed.seek(0)
            return Failed(f"{what}:\n{printed.read().decode(errors='replace')}")

        def look() -> None:
            watch()
            if time.monotonic() > until:
                raise fail(f"a rank has not ended after {limit:.0f} s")

        given = dict(os.environ) | dict(env or {})
        try:
            options: dict[str, Any] = {"stdout": printed, "stderr": printed}
            ranks = lab.start(command, ranks_per_node=ranks_per_node, env=given, **options)
            status = wait(ranks, watch=look)
        finally:
            lab.stop()
        if status:
            raise fail("a rank failed")


def ask(
    lab: Lab,
    module: str,
    env: Mapping[str, str] | None = None,
    *,
    limit: float = math.inf,
    ranks_per_node: int = 1,
    heard: Callable[[Any], object] = lambda _: None,
    **job: Any,
) -> list[Any]:
    """Run `python -m MODULE JOB` once per rank, JOB being JSON, and end the ranks.

    Args:
        lab, env, limit, ranks_per_node: as of `run`.
        module: its first argument is the job, which also names a new `folder` that the ranks share,
            and a file in it, `log`, to which rank 0 writes lines of JSON.
        heard: called with each of them, as soon as it is there.
        job: what the ranks are to know.

    Returns:
        The lines.

    Raises:
        Failed: a rank failed, or has not ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        log.touch()
        words = json.dumps(job | {"folder": folder, "log": str(log)})
        command = [sys.executable, "-m", module, words]
        found: list[Any] = []

        def look() -> None:
            whole = log.read_text().rpartition("\n")[0]
            for line in whole.splitlines()[len(found) :]:
                found.append(json.loads(line))
                heard(found[-1])

        run(lab, command, env, limit=limit, watch=look, ranks_per_node=ranks_per_node)
        look()
        return found


def answer(log: str, **record: Any) -> None:
    """Write a line to a job's log."""
    with Path(log).open("a") as file:
        print(json.dumps(record), file=file, flush=True)
