"""Tests of PyTorch's suite that pycomm or Gloo passed in the committed results pass now.

Every 20th test of those that `make conformance` runs with three ranks in Gloo's place; all of them,
and those with two ranks in NCCL's place, if the extent is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.__main__ import BOUND_TO_A_NAME, NOT_JUDGED, Config, Runner, read, worse
from tests.extent import FULL, part

RANKS = {"gloo": 3, "nccl": 2}
PASSED = sorted(
    {
        (row.like, row.test)
        for row in read()
        if row.status == "pass"
        and row.world_size == RANKS[row.like]
        and row.test not in BOUND_TO_A_NAME
    }
)


@pytest.fixture(scope="module")
def runner_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Runner]]:
    """One server per place that pycomm takes."""
    runners: dict[str, Runner] = {}
    log: Path = tmp_path_factory.mktemp("conformance") / "ranks.log"

    def get(like: str) -> Runner:
        if like not in runners:
            runners[like] = Runner(Config("pycomm", RANKS[like], like), log)
        return runners[like]

    yield get
    for runner in runners.values():
        runner.close()


IN_GLOOS_PLACE = [(like, test) for like, test in PASSED if like == "gloo"]


@pytest.mark.parametrize(("like", "test"), PASSED if FULL else part(IN_GLOOS_PLACE, 20))
def test_passes(like: str, test: str, runner_for: Callable[[str], Runner]) -> None:
    outcome = runner_for(like).run(test)
    assert outcome.status == "pass", f"{outcome.reason}\n{outcome.detail}"


def test_committed_results_have_no_bug() -> None:
    assert worse(read()) == []


def test_exceptions_are_few_and_known() -> None:
    """A test is left out only if it is listed with a reason, and none that pycomm could fail."""
    left_out = {row.test for row in read() if row.status == "n/a"}
    assert left_out <= set(NOT_JUDGED)
    assert len(NOT_JUDGED) + len(BOUND_TO_A_NAME) < 30
