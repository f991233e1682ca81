"""A launcher that runs scripts under torchrun, as users do."""

from __future__ import annotations

import os
from pathlib import Path

from tests.extent import FULL
from tests.torch.interpreter import ROOT, run

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
