"""Each trainer's example learns on pycomm what it learns on Gloo, loss by loss.

Every example prints its losses with all their digits, and whose group moved them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Trainer:
    """An example, and how it is brought to another backend."""

    package: str
    by_name: bool
    """its --backend is free text; else PYCOMM_TAKEOVER answers for the name that it insists on"""
    launcher: bool = True
    """torchrun starts the ranks; else the trainer does"""
    environment: dict[str, str] = field(default_factory=dict)


TRAINERS = [
    Trainer("accelerate", by_name=False),
    Trainer("transformers", by_name=False),
    Trainer("lightning", by_name=True),
    # Its extension for shared memory is compiled at the first run.
    Trainer("deepspeed", by_name=True, environment={"DS_ACCELERATOR": "cpu", "MAX_JOBS": "1"}),
    Trainer("ray", by_name=True, launcher=False, environment={"RAY_USAGE_STATS_ENABLED": "0"}),
]


def train(trainer: Trainer, backend: str, folder: Path) -> tuple[list[float], str]:
    """The losses of a run, and what moved them."""
    info = folder / "entry-1.0.dist-info"  # as an installation has it
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nentry = pycomm._autoload:register\n")
    takeover = ""
    command = [sys.executable]
    if trainer.launcher:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / f"examples/trainers/train_{trainer.package}.py")]
    if trainer.by_name:
        command += ["--backend", backend]
    elif backend == "pycomm":
        takeover = "gloo"
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "PYCOMM_TAKEOVER": takeover,
            **trainer.environment,
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    losses = re.findall(r"^loss[a-z ]* ([0-9.e-]+)$", done.stdout, re.MULTILINE)
    groups = re.findall(r"^group (.*)$", done.stdout, re.MULTILINE)
    assert len(groups) == 1, done.stdout
    return [float(loss) for loss in losses], groups[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.package)
def test_losses_are_those_of_gloo(trainer, tmp_path):
    if importlib.util.find_spec(trainer.package) is None:
        pytest.skip(f"{trainer.package} is not installed: make trainers")
    theirs, not_ours = train(trainer, "gloo", tmp_path)
    ours, group = train(trainer, "pycomm", tmp_path)
    assert not_ours == "not pycomm's"
    assert group.startswith("2 ranks: shm")
    assert len(ours) >= 6
    assert ours == theirs
