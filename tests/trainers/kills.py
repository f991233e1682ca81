"""Replicas under torchft that are killed at random moments and replaced, again and again.

    python -m tests.trainers.kills --kills 200 --seed 7

Three replicas of the example train with four bits, in processes of this machine. Each time any but
the first is killed by SIGKILL at a random moment of a step; the others must go on without it, and
another process must take its place. In the end all parameters must be equal, to the bit, at every
step that all have taken, as those of each dead replica were at its steps. The first replica lives
from the first step to the last, and may hold no file, socket, thread, mapping or child more at the
end than at first, and hardly more memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from tests.soak.held import COUNTS, Sample, breaches, held

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/trainers/train_torchft.py"
LIMIT = 240  # seconds; a process takes a minute to start on a busy machine


class Replica:
    """A replica's process, and what it has printed about its steps.

    It is forked from a process that has imported torch, so it starts at once.
    """

    def __init__(self, number: int, lighthouse: str, log: Path, *options: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # What the example imports; the first optimizer imports torch._dynamo.
        preload = ["torch._dynamo", "pycomm.torchft", "tests.trainers.kills"]
        context.set_forkserver_preload(preload)
        reads, writes = context.Pipe(duplex=False)
        arguments = (number, lighthouse, str(log), options, writes)
        self._child = context.Process(target=_run, args=arguments, daemon=True)
        self._child.start()
        writes.close()
        self.process = self._child.pid
        self.lines: list[dict[str, Any]] = []
        self._printed = os.fdopen(os.dup(reads.fileno()))
        reads.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._printed:
            for line in self._printed:
                if line.startswith("{"):
                    self.lines.append(json.loads(line))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("committed")]

    @property
    def digests(self) -> dict[int, str]:
        return {line["step"]: line["digest"] for line in self.steps}

    def together(self, count: int) -> bool:
        """Whether its last step was taken by so many."""
        return bool(self.steps) and self.steps[-1]["participants"] == count

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process, number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._child.join(10)
        self._reader.join(10)


def _run(number: int, lighthouse: str, log: str, options: tuple[str, ...], writes: Any) -> None:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    os.dup2(writes.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = [str(EXAMPLE), "--replica", str(number), *options]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


class Lab:
    """A lighthouse and replicas, all of which end with it."""

    def __init__(self, folder: Path) -> None:
        self.server = LighthouseServer(
            bind="[::]:0",
            min_replicas=2,
            join_timeout_ms=1000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=500,
        )
        self.log = folder / "log"
        self.log.touch()
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

    def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        self.server.shutdown()


OPTIONS = ("--codec", "int4", "--pause", "0", "--steps", "1000000")
TRAINS = 20  # steps with all three before the next kill
LAST = 5  # samples: what is left behind is in all of them, and what is being closed is not
TELLS = 25  # kills after which a line says that it goes on


@dataclass
class Outcome:
    """What has happened.

    Attributes:
        waits: seconds from each kill to the next step that both others have committed.
        common: steps that all three have taken at the end.
        samples: what the first replica held when all three were together.
    """

    waits: list[float] = field(default_factory=list)
    common: int = 0
    samples: list[Sample] = field(default_factory=list)

    def note(self, process: int, steps: int) -> None:
        """Take a sample of a process after so many kills.

        How many pages of the group's shared memory are in use depends on the moment; that none of
        it is left behind is told by the number of mappings.
        """
        found = held(process)
        private = found.pop("rss_kib") - found.pop("shared_kib")
        self.samples.append(
            Sample(len(self.waits), {**found, "private_kib": private, "steps": steps})
        )

    def breaches(self) -> list[str]:
        """Everything that has grown."""
        *early, last = self.samples
        least = {name: min(s.held[name] for s in self.samples[-LAST:]) for name in COUNTS}
        return breaches([*early, Sample(last.events, {**last.held, **least})])


def kill_and_replace(lab: Lab, kills: int, seed: int, *options: str) -> Outcome:
    """Let replicas die and come back so many times.

    Raises:
        AssertionError: one hangs, or has other parameters than another at the same step.
    """
    outcome, draw, told = Outcome(), random.Random(seed), time.monotonic()
    living = {number: lab.start(number, *OPTIONS, *options) for number in range(3)}
    oldest = living[0]

    def trains(replica: Replica) -> bool:
        return len(replica.steps) > TRAINS and replica.together(3)

    for kill in range(kills):
        lab.wait(lambda: all(map(trains, living.values())), f"not all train after {kill} kills")
        outcome.note(oldest.process, len(oldest.steps))
        time.sleep(draw.uniform(0, 0.2))
        gone = living.pop(draw.choice([1, 2]))
        killed = time.time()
        gone.send(signal.SIGKILL)
        lab.wait(
            lambda: all(r.together(2) for r in living.values()),
            f"the others do not go on after {kill + 1} kills",
        )
        outcome.waits.append(
            max(
                next(
                    line["time"]
                    for line in replica.steps
                    if line["participants"] == 2 and line["time"] > killed
                )
                for replica in living.values()
            )
            - killed
        )
        known, final = oldest.digests, max(gone.digests)  # which the others may take without it
        assert all(known.get(s, d) == d for s, d in gone.digests.items() if s < final)
        gone.end()
        lab.replicas.remove(gone)
        number = ({1, 2} - living.keys()).pop()
        living[number] = lab.start(number, *OPTIONS, *options)
        if (kill + 1) % TELLS == 0:
            print(f"{kill + 1} kills in {time.monotonic() - told:.0f} s", file=sys.stderr)
    lab.wait(lambda: all(map(trains, living.values())), "not all take part in the end")
    outcome.note(oldest.process, len(oldest.steps))
    for replica in living.values():
        replica.send(signal.SIGSTOP)  # so that all have printed the same steps
    common = set.intersection(*(set(replica.digests) for replica in living.values()))
    outcome.common = len(common)
    assert outcome.common >= TRAINS
    for step in common:
        assert len({replica.digests[step] for replica in living.values()}) == 1, f"at step {step}"
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainers.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pycomm-kills-") as folder:
        lab = Lab(Path(folder))
        try:
            outcome = kill_and_replace(lab, options.kills, options.seed)
        finally:
            lab.end()
    waits, wrong = outcome.waits, outcome.breaches()
    print(
        f"{options.kills} kills in {(time.monotonic() - start) / 60:.1f} minutes: none hung, and "
        f"all parameters are equal at {outcome.common} common steps\n"
        f"the next step of both others came after {statistics.median(waits):.2f} s (median), "
        f"{max(waits):.2f} s at most"
    )
    first, last = outcome.samples[0].held, outcome.samples[-1].held
    for name in first:
        print(f"{name:<11} {first[name]:>8} {last[name]:>8}")
    for one in wrong:
        print(f"not flat: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
