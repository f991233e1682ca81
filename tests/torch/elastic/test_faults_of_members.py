"""A sample of the random faults while members change; `make soak` plays more of them."""

from __future__ import annotations

import pytest

from tests.faults.injection.case import ELASTIC, draw
from tests.faults.injection.judge import breaches
from tests.faults.injection.play import play

FAULTS = ("kill", "stop", "kill2")


@pytest.mark.parametrize(("phase", "fault"), list(zip(ELASTIC, FAULTS, strict=True)))
def test_a_fault_while_members_change_is_told_and_the_others_form_the_group_anew(phase, fault):
    case = draw(7, 2, transports=["shm", "tcp"], faults=[fault], phases=[phase])
    assert case.phase == phase
    played = play(case)
    assert breaches(played) == [], f"{case}\n{played.stacks}"
