"""torchft's own tests of every collective pass on pycomm's group, also those it skips for Gloo.

They come with torchft (BSD licence), and run here with `ProcessGroupPycomm`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torchft")

from torchft import process_group_test

from pycomm.torchft import ProcessGroupPycomm

COLLECTIVES = sorted(process_group_test._ALL_COLLECTIVES)


class Groups(process_group_test.MultiPgBaseTest):
    """Three replicas, threads of one process as torchft makes them."""

    WORLD_SIZE = 3
    __test__ = False

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroupPycomm:
        return ProcessGroupPycomm(timeout=timedelta(seconds=10))


@pytest.fixture(scope="module")
def groups() -> Any:
    Groups.setUpClass()
    yield Groups("_run_parallel")
    Groups.tearDownClass()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_of_torchft(groups: Groups, collective: str) -> None:
    groups._run_parallel(collective)
