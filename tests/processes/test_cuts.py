"""A rank whose network fails for good is named by the others at the deadline, however it fails."""

from __future__ import annotations

from itertools import cycle, product

import pytest

from pycomm.bench import netlab
from tests.extent import FULL
from tests.faults.injection.case import NETWORK, draw
from tests.faults.injection.judge import breaches
from tests.faults.injection.play import lab_of, play


@pytest.fixture(scope="module")
def lab():
    try:
        return lab_of(4)
    except netlab.LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


PHASES = ("split", "steady")


@pytest.mark.parametrize(
    ("fault", "phase"), product(NETWORK, PHASES) if FULL else zip(NETWORK, cycle(PHASES))
)
def test_a_rank_that_is_cut_off_is_named_and_leaves_nothing_behind(lab, fault, phase):
    case = draw(7, 0, transports=["tcp"], faults=[fault], phases=[phase])
    played = play(case, lab)
    assert breaches(played) == [], f"{case}\n{played.stacks}"
