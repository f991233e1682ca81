"""Compressed replicas under torchft's lighthouse: killed, replaced, and equal to the bit.

The example is run as users run it, in processes of this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer

from tests.extent import FULL

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/trainers/train_torchft.py"
LIMIT = 240  # seconds; a process takes a minute to start on a busy machine


class Replica:
    """A replica's process, and what it has printed about its steps."""

    def __init__(self, number: int, lighthouse: str, log: Path, *options: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--replica", str(number), *options],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TORCHFT_LIGHTHOUSE": lighthouse,
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("committed")]

    @property
    def digests(self) -> dict[int, str]:
        return {line["step"]: line["digest"] for line in self.steps}

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        self._log.close()


class Lab:
    """A lighthouse and replicas, all of which end with the test."""

    def __init__(self, folder: Path) -> None:
        self.server = LighthouseServer(
            bind="[::]:0",
            min_replicas=2,
            join_timeout_ms=1000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=500,
        )
        self.log = folder / "log"
        self.replicas: list[Replica] = []

    def start(self, number: int, *options: str) -> Replica:
        replica = Replica(number, self.server.address(), self.log, *options)
        self.replicas.append(replica)
        return replica

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.log.read_text()[-4000:]}"
            time.sleep(0.01)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for replica in made.replicas:
        replica.end()
    made.server.shutdown()


def together(replica: Replica, count: int) -> bool:
    """Whether the last step of a replica was taken by so many."""
    return bool(replica.steps) and replica.steps[-1]["participants"] == count


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("codec", "transport"), [("int4", "auto"), ("topk:0.05", "tcp"), ("powersgd:2", "auto")]
)
def test_a_replica_is_killed_and_comes_back(lab: Lab, codec: str, transport: str) -> None:
    options = ("--codec", codec, "--transport", transport, "--pause", "0.02", "--steps", "100000")
    first, second, third = (lab.start(number, *options) for number in range(3))
    lab.wait(
        lambda: all(together(r, 3) and len(r.steps) > 30 for r in (first, second, third)),
        "three replicas do not train",
    )
    second.process.send_signal(signal.SIGKILL)
    killed = time.time()
    lab.wait(lambda: together(first, 2) and together(third, 2), "the others do not go on")
    for replica in (first, third):
        (after, *_) = [line for line in replica.steps if line["time"] > killed + 0.02]
        took = after["time"] - killed
        print(f"{codec}, {transport}: the next step was committed {took:.3f} s after the kill")
    lab.wait(lambda: len(first.steps) > 60, "the others do not go on for long")
    again = lab.start(1, *options)
    lab.wait(
        lambda: together(again, 3) and len(again.steps) > 20, "the replica does not take part again"
    )
    everybody = (first, third, again)
    for replica in everybody:
        replica.process.send_signal(signal.SIGSTOP)  # so that all have printed the same steps
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


def resident(replica: Replica) -> int:
    """Return the resident memory of a replica's process, in KiB."""
    status = Path(f"/proc/{replica.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.timeout(7200)
def test_replicas_that_are_killed_at_random_and_replaced_end_equal(lab: Lab) -> None:
    """Any replica but the first is killed at any moment of a step, again and again."""
    kills = 200 if FULL else 4
    draw = random.Random(kills)
    options = ("--codec", "int4", "--pause", "0", "--steps", "1000000")
    living = {number: lab.start(number, *options) for number in range(3)}
    oldest, samples = living[0], []
    for kill in range(kills):
        lab.wait(
            lambda: all(together(r, 3) and len(r.steps) > 20 for r in living.values()),
            f"not all take part again after {kill} kills",
        )
        number = draw.choice([1, 2])
        time.sleep(draw.uniform(0, 0.2))
        gone = living.pop(number)
        gone.process.send_signal(signal.SIGKILL)
        lab.wait(lambda: all(together(r, 2) for r in living.values()), "the others do not go on")
        known, final = oldest.digests, max(gone.digests)  # which the others may take without it
        assert all(known.get(s, d) == d for s, d in gone.digests.items() if s < final)
        gone.end()
        samples.append(resident(oldest))
        living[number] = lab.start(number, *options)
    lab.wait(
        lambda: all(together(r, 3) and len(r.steps) > 20 for r in living.values()),
        "not all take part in the end",
    )
    for replica in living.values():
        replica.process.send_signal(signal.SIGSTOP)
    common = set.intersection(*(set(replica.digests) for replica in living.values()))
    assert len(common) > 20
    for step in common:
        assert len({replica.digests[step] for replica in living.values()}) == 1, f"at step {step}"
    print(f"{kills} kills; resident memory of the first replica in KiB: {samples}")
