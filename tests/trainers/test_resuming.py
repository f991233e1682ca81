"""Coded momentum under trainers with schedulers, clipping, accumulation, and from checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch.interpreter import ROOT
from tests.trainers import resuming


def train(trainer: str, way: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what rank 0 of `resuming` prints."""
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed: make trainers")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *ranks, "-m", "tests.trainers.resuming", trainer, way, str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYCOMM_TAKEOVER": "gloo",
            "PYCOMM_RUN": "--optimizer sign" if way == "launcher" else "",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("policy: sign") == 2  # both runs
    (found,) = (line for line in done.stdout.splitlines() if line.startswith('{"'))
    runs = json.loads(found)
    for kind in ("whole", "resumed"):
        assert runs[kind]["optimizer"] == "CodedAdamW"
    return runs


def half(numbers: list[float]) -> list[float]:
    return numbers[len(numbers) // 2 :]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", resuming.TRAINERS)
def test_a_line_of_code_resumes_to_the_bit(trainer, tmp_path):
    runs = train(trainer, "line", tmp_path)
    exact, whole, resumed = (runs[kind] for kind in ("exact", "whole", "resumed"))
    assert exact["optimizer"] == "AdamW"
    assert whole["rates"] == exact["rates"]
    assert whole["losses"] != exact["losses"]
    assert whole["losses"] == pytest.approx(exact["losses"], rel=0.15)
    for name in ("rates", "losses"):
        assert resumed[name] == half(whole[name])
    assert resumed["weights"] == whole["weights"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", resuming.TRAINERS)
def test_the_launchers_optimizer_resumes(trainer, tmp_path):
    """A trainer's checkpoint has all but what each rank keeps of the momentum."""
    runs = train(trainer, "launcher", tmp_path)
    whole, resumed = runs["whole"], runs["resumed"]
    assert resumed["rates"] == half(whole["rates"])
    assert resumed["losses"][0] == half(whole["losses"])[0]  # equal weights
    assert resumed["losses"] == pytest.approx(half(whole["losses"]), rel=0.05)
