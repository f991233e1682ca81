"""Jobs of a lab's ranks: a command that each runs, or a function, and what the first one yields.

    python -m pycomm.bench.lab.jobs FILE LOG

is a rank of `ask`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def command_of(
    function: Callable[..., Iterable[Any]], values: Sequence[Any], log: Path
) -> list[str]:
    """Return the command of a rank that calls a generator function of a module.

    Args:
        function: what it yields on the first rank goes to a file: values that JSON has.
        values: its arguments, which are pickled beside the file.
        log: the file, which does not exist yet.
    """
    log.touch()
    job = log.with_suffix(".job")
    job.write_bytes(pickle.dumps((function, values)))
    return [sys.executable, "-m", "pycomm.bench.lab.jobs", str(job), str(log)]


def ask(
    lab: Lab,
    function: Callable[..., Iterable[Any]],
    *values: Any,
    heard: Callable[[Any], object] = lambda _: None,
    **options: Any,
) -> list[Any]:
    """Call a generator function of a module on each rank, and end the ranks.

    Args:
        lab: the nodes.
        function, values: as of `command_of`.
        heard: called with each value as soon as it is there.
        options: `env`, `limit` and `ranks_per_node`, as of `run`.

    Returns:
        The values.

    Raises:
        Failed: a rank failed, or has not ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = command_of(function, values, log)
        found: list[Any] = []

        def look() -> None:
            whole = log.read_text().rpartition("\n")[0]
            for line in whole.splitlines()[len(found) :]:
                found.append(json.loads(line))
                heard(found[-1])

        run(lab, command, watch=look, **options)
        look()
        return found


def main(job: str, log: str) -> None:
    """Be one rank."""
    function, values = pickle.loads(Path(job).read_bytes())
    first = os.environ["RANK"] == "0"
    with open(log if first else os.devnull, "a") as file:
        for found in function(*values):
            print(json.dumps(found), file=file, flush=True)
    sys.stdout.flush()
    # Some systems leave threads that would keep this process, and one of Gloo's that releases a
    # tensor at the interpreter's exit aborts it (pytorch#190489).
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
