"""A member that is killed in the middle of `reconfigure` is named long before the deadline."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.extent import part
from tests.faults.injection.case import ELASTIC, draw
from tests.faults.injection.judge import breaches
from tests.faults.injection.play import play
from tests.preload import library
from tests.torch.elastic.killed_while_forming import KERNEL
from tests.torch.interpreter import ROOT

CALLS = range(1, 25)
# A transport, and the rank that is killed. After its fifth call, where the sample begins, it may
# have joined already.
CASES = ("shm", 1), ("tcp", 2), ("tcp", 0)


@pytest.mark.timeout(600)
def test_a_member_killed_at_any_call_is_named(tmp_path):
    """At a timeout they would raise `Timeout`; the deadline is twenty seconds."""
    command = ["-m", "tests.torch.elastic.killed_while_forming"]
    for transport, killed in CASES:
        calls = part(CALLS, 12, offset=4)
        command.append(",".join(map(str, [transport, killed, *calls])))
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": library(KERNEL, tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------------------------- random faults
# A sample of the random faults while members change; `make soak` plays more of them.


FAULTS = ("kill", "stop", "kill2")


@pytest.mark.parametrize(("phase", "fault"), list(zip(ELASTIC, FAULTS, strict=True)))
def test_a_fault_while_members_change_is_told(phase, fault):
    case = draw(7, 2, transports=["shm", "tcp"], faults=[fault], phases=[phase])
    assert case.phase == phase
    played = play(case)
    assert breaches(played) == [], f"{case}\n{played.stacks}"
