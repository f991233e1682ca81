"""Runs groups over links with delay, step by step, and counts the round trips of each step."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.bench.wan import rank as wan_rank
from pycomm.bench.wan.lab import WanLab

PROMISED = {
    "init": 9,  # 8 if the ranks reach the exchange of values together, after torch's part of it
    "first operation": 2,
    "new_group": 5,
    "first operation of new_group": 2,
    "split_group": 6,  # two are torch's, which connects to its store once more
    "first operation of split_group": 2,
    "reconfigure": 8,
    "first operation of reconfigure": 2,
    "reconfigure again": 8,
    "reconfigure with a new member": 8,  # the last one has left, and another process has come
    "shutdown": 2,
}
"""the most round trips that a step of pycomm takes, where all ranks begin it at once"""
LIMIT = 300.0  # seconds for one step: a rank that hangs must not hang this


class Failed(RuntimeError):
    """A rank ended early or did not end; the text holds what it printed."""


@dataclass(frozen=True)
class Step:
    """Cost of one step.

    Attributes:
        seconds: of the slowest rank.
        round_trips: half of the longest chain of one-way trips that packets made. It depends on
            what waits for what, and not on how fast this machine is.
        results: what the step returned on each rank.
    """

    name: str
    seconds: float
    round_trips: float
    results: list[Any]


def run_steps(lab: WanLab, backend: str, env: dict[str, str]) -> tuple[list[Step], str]:
    """Return the steps of one job with one rank per node, and all that its ranks have printed.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as printed:
        folder = Path(name)
        command = [sys.executable, "-m", "pycomm.bench.wan.rank", name, backend]
        ranks = lab.start(command, env=env, stdout=printed, stderr=printed)
        slowest = max(2 * pair.delay for pair in lab.pairs.values())

        def text() -> str:
            printed.seek(0)
            return printed.read().decode(errors="replace")

        def await_all(pattern: str) -> list[Path]:
            files = [folder / pattern.format(rank=rank) for rank in range(lab.nodes)]
            until = time.monotonic() + LIMIT
            while not all(file.exists() for file in files):
                if any(rank.poll() for rank in ranks) or time.monotonic() > until:
                    raise Failed(f"{backend}: a rank failed in step {pattern}:\n{text()}")
                time.sleep(0.001)
            return files

        steps = []
        for number, step in enumerate(wan_rank.STEPS):
            await_all(f"{number}.{{rank}}")
            time.sleep(1.5 * slowest)  # until the packets of the step before are gone
            lab.mark()
            (folder / f"{number}.go").touch()
            done = [json.loads(file.read_text()) for file in await_all(f"{number}.{{rank}}.done")]
            trips = lab.trips()
            results = [one["result"] for one in done]
            if any(isinstance(result, str) for result in results):
                continue
            steps.append(Step(step, max(one["seconds"] for one in done), trips / 2, results))
        for rank in ranks:
            if rank.wait(LIMIT) != 0:
                raise Failed(f"{backend}: a rank failed at its end:\n{text()}")
        return steps, text()
