"""torchft's own suites, which come with it (BSD licence), run on pycomm's group in Gloo's place.

Those of its Manager and of its LocalSGD and DiLoCo talk to its real lighthouse. The Manager's run a
second time with gradients that travel in four bits.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchft")

from torchft import local_sgd_integ_test, manager_integ_test, process_group_test
from torchft._test import diloco_trainer

import pycomm
from pycomm.torchft import DistributedDataParallel, ProcessGroupPycomm

pytestmark = pytest.mark.timeout(300)

INT4 = pycomm.Policy("int4", rules=(pycomm.Rule(codec="int4"),))  # however small they are


@pytest.fixture(autouse=True)
def _on_pycomm(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = process_group_test, manager_integ_test, local_sgd_integ_test, diloco_trainer
    for module in suites:
        monkeypatch.setattr(module, "ProcessGroupGloo", ProcessGroupPycomm)


class Groups(process_group_test.MultiPgBaseTest):
    """Every collective, and again after a member has left; those that Gloo's tests skip, too."""

    BACKEND = "gloo"
    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroupPycomm:
        return ProcessGroupPycomm(timeout=timedelta(seconds=10))

    def assertRaisesRegex(self, kind: Any, pattern: Any, *args: Any, **kwargs: Any) -> Any:
        """Take pycomm's words for a member that has left, too."""
        expect = super().assertRaisesRegex
        return expect(kind, f"{pattern}|left|closed|aborted", *args, **kwargs)

    @process_group_test.parameterized.expand(process_group_test._ALL_COLLECTIVES)
    def test_collective_with_resiliency(self, collective: str) -> None:
        self._run_with_resiliency(collective, device="cpu")


class Group(process_group_test.ProcessGroupTest):
    """The interface of a group."""

    def assertRaisesRegex(self, kind: Any, pattern: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the words of torch's store, if that is what has no time to answer."""
        expect = super().assertRaisesRegex
        return expect(kind, f"{pattern}|timed out after 10ms", *args, **kwargs)


class Manager(manager_integ_test.ManagerIntegTest):
    """The Manager: recovery, quorums, replicas of several ranks."""


class CompressedManager(manager_integ_test.ManagerIntegTest):
    """The same with DDP that sends four bits."""

    @pytest.fixture(autouse=True)
    def _compressed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compressed = partial(DistributedDataParallel, codec=INT4)
        monkeypatch.setattr(manager_integ_test, "DistributedDataParallel", compressed)


class LocalSGD(local_sgd_integ_test.LocalSGDIntegTest):
    """LocalSGD, DiLoCo and Streaming DiLoCo under the Manager."""
