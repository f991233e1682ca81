"""Compressed replicas under torchft's lighthouse: killed, replaced, and equal to the bit.

The example is run as users run it, in processes of this machine.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from tests.trainers.kills import kill_and_replace
from tests.trainers.replicas import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.end()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("codec", "transport"), [("int4", "auto"), ("topk:0.05", "tcp"), ("powersgd:2", "auto")]
)
def test_a_replica_is_killed_and_comes_back(lab: Lab, codec: str, transport: str) -> None:
    options = ("--codec", codec, "--transport", transport, "--pause", "0.02", "--steps", "100000")
    first, second, third = (lab.start(number, *options) for number in range(3))
    lab.wait(
        lambda: all(r.together(3) and len(r.steps) > 30 for r in (first, second, third)),
        "three replicas do not train",
    )
    second.send(signal.SIGKILL)
    killed = time.time()
    lab.wait(lambda: first.together(2) and third.together(2), "the others do not go on")
    for replica in (first, third):
        (after, *_) = [line for line in replica.steps if line["time"] > killed + 0.02]
        took = after["time"] - killed
        print(f"{codec}, {transport}: the next step was committed {took:.3f} s after the kill")
    lab.wait(lambda: len(first.steps) > 60, "the others do not go on for long")
    again = lab.start(1, *options)
    lab.wait(
        lambda: again.together(3) and len(again.steps) > 20, "the replica does not take part again"
    )
    everybody = (first, third, again)
    for replica in everybody:
        replica.send(signal.SIGSTOP)  # so that all have printed the same steps
    common = set.intersection(*(set(replica.digests) for replica in everybody))
    assert len(common) >= 20
    for step in common:
        assert len({replica.digests[step] for replica in everybody}) == 1, f"at step {step}"
    # It had the others' parameters after its first step, and those of the former replica before.
    assert again.steps[0]["step"] in first.digests
    assert again.steps[0]["digest"] == first.digests[again.steps[0]["step"]]
    before = second.digests.keys() & first.digests.keys() & third.digests.keys()
    assert len(before) >= 20
    assert all(first.digests[s] == third.digests[s] == second.digests[s] for s in before)
    losses = [line["loss"] for line in first.steps]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.timeout(600)
def test_replicas_killed_at_random_end_equal(lab: Lab) -> None:
    """Any replica but the first, at any moment of a step; `make soak` has two hundred kills."""
    outcome = kill_and_replace(lab, kills=4, seed=4)
    assert len(outcome.waits) == 4
