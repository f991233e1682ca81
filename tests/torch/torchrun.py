"""A launcher that runs scripts under torchrun, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(*command: str, folder: Path, ranks: int = 2, **environment: str) -> str:
    """Run a command under torchrun and return its ranks' output of both streams."""
    rendezvous = ["--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *rendezvous, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
