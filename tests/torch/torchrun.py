"""Launchers that run scripts under torchrun, as users do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.extent import FULL
from tests.torch.interpreter import ROOT, free_port, run

# Ranks are forks of the agent, which has imported torch; they end without their exit functions.
FORKED = ["--run-path", "--start-method", "fork"]


def launch(
    *command: str, folder: Path, ranks: int = 2, fresh: bool = FULL, **environment: str
) -> str:
    """Run a script, behind options, under torchrun; return its ranks' output of both streams.

    With `fresh` the ranks are interpreters of their own, as users' are; else they are forks.
    """
    start = [] if fresh else FORKED
    rendezvous = ["--standalone", "--nproc-per-node", str(ranks)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = run(
        *("-m", "torch.distributed.run", *rendezvous, *start, *command),
        env={**os.environ, **own},
        cwd=folder,
        merged=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def agent(folder: Path, port: int, ranks: int) -> subprocess.Popen[bytes]:
    """Start one of up to four agents of torchrun, each with ranks of its own, on train.py.

    They meet at a port, whenever they come. Their output goes to the file `output`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4"]
    command += ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "joins"]
    command += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=1"]
    command += ["--max-restarts", "5", "--monitor-interval", "0.2", "train.py"]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                # Else agents of one machine wait for each other after a change of members.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End an agent, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def joined_by_another(
    folder: Path, ranks: int, reached: Callable[[], tuple[int, int]], more: int, limit: float = 100
) -> tuple[int, str]:
    """Run train.py in an agent of so many ranks, joined by one of one rank, until a file says stop.

    Args:
        reached: returns how many ranks train, and how many steps have been taken.
        more: steps before the other agent starts, and those with all ranks before the end.
        limit: seconds of each wait.

    Returns:
        the steps after which the other agent was started, and the output of all ranks.
    """
    output, agents = folder / "output", []
    output.touch()

    def wait(wanted: int, least: int) -> int:
        until = time.monotonic() + limit
        while True:
            training, steps = reached()
            if training == wanted and steps >= least:
                return steps
            assert time.monotonic() < until, output.read_text()[-4000:]
            assert agents[0].poll() is None, output.read_text()[-4000:]
            time.sleep(0.05)

    port = free_port()
    try:
        agents.append(agent(folder, port, ranks))
        before = wait(ranks, more)
        agents.append(agent(folder, port, 1))
        wait(ranks + 1, before + more)
        (folder / "stop").touch()
        for process in agents:
            assert process.wait(limit) == 0, output.read_text()[-4000:]
    finally:
        for process in agents:
            end(process)
    return before, output.read_text()
