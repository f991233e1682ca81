"""The step of a GPU on a virtual clock: what the shipped hooks ask of a device, at its speeds.

The hooks run on the stand-in device of the tests (`python -m tests.torch.device.recorded`, in a
checkout), which notes each launch, copy, wait, exchange and call of a Python function, in order. No
formula of a step is in here: a replay takes the notes one by one. Parameters are an eighth of the
model's, and bytes are counted eight times.

The speeds are those of an H200 (`docs/gpu.md`): with them the path of November 2026 takes what was
measured then, within a fifth (`tests/bench/test_step.py`). That was over a late carrier: the host
waits for an exchange, and then queues the copy back, as Gloo does, and pycomm where streams cannot
be held. Rows have an ordered carrier, such as NCCL: the stream waits. What else NCCL costs is not
modelled: its exact all-reduce reached 55 % of 10 Gbit/s there, and 93 % of 1 Gbit/s.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pycomm.bench.common.harness import Row
from pycomm.bench.lab.jobs import Failed
from pycomm.bench.step import FULL, Pace, wire_seconds
from pycomm.bench.training.methods import Method
from pycomm.bench.training.results import describe
from pycomm.bench.training.train import Config, parameters, shapes
from pycomm.plan.model import BUCKET, FIRST_BUCKET
from pycomm.units import parse_rate

ROOT = Path(__file__).parents[2]
RECORDER = "tests.torch.device.recorded"
SCALE = 8
CODECS = {"int4": "int4", "int8": "int8", "sign": "coded sign"}

# What the recorder notes: kind, stream and value. The first seven are those of fake_device.cpp.
OPERATION, WORK, COPY, RECORD, BLOCK, WAIT_STREAM, WAIT_EVENT = range(7)
CALL, EXCHANGE, ANSWER, BUCKET_READY, RETURN, STEP, ARRIVAL = range(7, 14)

COMPUTE = 0
"""The stream of forward and backward, the device's default."""

# Seconds of the host for a Python call, an operation of torch, a collective of the caller's group.
CALLS, OPERATIONS, COLLECTIVES = 1e-6, 8e-6, 40e-6
LAUNCH, MEMORY, BUS = 4e-6, 3e12, 50e9
"""Of the device: seconds of a launch, and bytes per second of its memory and of a copy."""
FIRST, EACH, OPTIMIZER = 14e-3, 1e-3, 2e-3
"""Seconds of computing until the first bucket is ready, from one to the next, and of AdamW."""

GOALS = {"launches": 8, "calls": 20, "waits": 0, "held": 0}
"""Most launches and Python calls of a bucket, waits of the host in a step, and exchanges for which
the compute stream waits. A late carrier itself waits twice a bucket."""
PASSES = {"launches": 4, "calls": 15}
"""What the passes of a coded optimizer over moments may add to these."""
OVER = 1.1
"""What a step may be of the bound."""


@dataclass(frozen=True)
class Recorded:
    """What the hooks have asked for in a step."""

    notes: Sequence[tuple[int, int, int]]
    exchanges: Sequence[tuple[int, int, int]]
    """Of each the bytes out of the device, sent by this rank, and into the device."""
    path: str

    @classmethod
    def parse(cls, text: str) -> Recorded:
        """Read a line of the recorder."""
        found: dict[str, Any] = json.loads(text)
        flat = found["notes"]
        notes = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        return cls(notes, [tuple(one) for one in found["exchanges"]], found["path"])

    def counts(self) -> list[Counter[int]]:
        """Return how often each kind was noted in each bucket's hook."""
        found: list[Counter[int]] = []
        inside = False
        for kind, _, _ in self.notes:
            if kind == BUCKET_READY:
                found.append(Counter())
                inside = True
            elif kind == RETURN:
                inside = False
            elif inside:
                found[-1][kind] += 1
        return found

    def summary(self) -> dict[str, float]:
        """Return launches, copies and calls of a median bucket, and waits in a step."""
        each = self.counts()

        def middle(*kinds: int) -> float:
            return statistics.median(sum(one[kind] for kind in kinds) for one in each[1:])

        waits = sum(kind in (WAIT_STREAM, WAIT_EVENT, ANSWER) for kind, _, _ in self.notes)
        answers = (ANSWER, ARRIVAL)
        # An exchange copies its payload out, and the others' in.
        copies = middle(COPY) + 2 * middle(EXCHANGE)
        held = sum(kind in answers and stream == COMPUTE for kind, stream, _ in self.notes)
        found = {"launches": middle(WORK), "copies": copies, "calls": middle(CALL)}
        return found | {"waits": waits, "held": held}


@dataclass
class Lane:
    """A thread, a stream of a device, or one direction of a link."""

    free: float = 0.0
    """When it has done all that it was given."""

    def take(self, seconds: float, *after: float) -> float:
        """Add a task, which begins when the lane is free and all else has happened; return its end.

        Args:
            seconds: of the task.
            after: times before which it cannot begin.
        """
        self.free = max((self.free, *after)) + seconds
        return self.free


class Replay:
    """The clock of one rank.

    Args:
        recorded: a step.
        link: bytes per second of payloads.
        scale: what bytes are multiplied by.
    """

    def __init__(self, recorded: Recorded, link: float, scale: float) -> None:
        self._recorded, self._rate, self._scale = recorded, link, scale
        self.host, self.link, self.up, self.down = Lane(), Lane(), Lane(), Lane()
        self.streams: defaultdict[int, Lane] = defaultdict(Lane)
        self._events: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self.sent = 0.0

    def step(self) -> float:
        """Take the step; return when the compute stream has done it."""
        for note in self._recorded.notes:
            self._take(*note)
        if not any(kind == STEP and value for kind, _, value in self._recorded.notes):
            self._work(self.streams[COMPUTE], OPTIMIZER)
        return self.streams[COMPUTE].free

    def _work(self, stream: Lane, seconds: float) -> None:
        self.host.take(OPERATIONS)
        stream.take(seconds, self.host.free)

    def _take(self, kind: int, number: int, value: int) -> None:
        host, stream = self.host, self.streams[number]
        if kind == OPERATION:
            host.take(OPERATIONS)
        elif kind == CALL:
            host.take(CALLS)
        elif kind == WORK:
            self._work(stream, LAUNCH + value * self._scale / MEMORY)
        elif kind == COPY:
            self._work(stream, value * self._scale / BUS)
        elif kind == RECORD:
            self._events[value] = max(stream.free, host.free)
        elif kind == BLOCK:
            stream.take(0.0, self._events.get(value, 0.0))
        elif kind == WAIT_STREAM:
            host.take(0.0, stream.free)
        elif kind == WAIT_EVENT:
            host.take(0.0, self._events.get(value, 0.0))
        elif kind == EXCHANGE:
            out, sent, _ = (n * self._scale for n in self._recorded.exchanges[value])
            host.take(COLLECTIVES)
            self.sent += sent
            self.up.take(out / BUS, stream.free, host.free)
            self._arrived[value] = self.link.take(sent / self._rate, self.up.free)
        elif kind in (ANSWER, ARRIVAL):
            came = self._recorded.exchanges[value][2] * self._scale
            arrived = self._arrived[value]
            if kind == ANSWER:  # the host waits, and then queues the copy
                arrived = host.take(0.0, arrived)
            stream.take(0.0, self.down.take(came / BUS, arrived))
        elif kind == BUCKET_READY:
            begin, seconds = host.free, EACH if value else FIRST
            host.take(seconds)
            self.streams[COMPUTE].take(seconds, begin)


@dataclass(frozen=True)
class Modelled:
    """A step that repeats."""

    seconds: float
    sent: float


def modelled(recorded: Recorded, rate: float, scale: float, repeats: int = 4) -> Modelled:
    """Return the step that repeats on links of so many bytes per second."""
    replay, ends = Replay(recorded, FULL * rate, scale), [0.0]
    for _ in range(repeats):
        replay.sent = 0.0
        ends.append(replay.step())
    return Modelled(ends[-1] - ends[-2], replay.sent)


def small(config: Config) -> Config:
    """Return a model with an eighth of the values in as many tensors."""
    root = math.sqrt(SCALE)
    width, context = (round(n / root) for n in (config.width, config.context))
    vocabulary = round(config.vocabulary / root)
    return replace(config, width=width, context=context, vocabulary=vocabulary, heads=1)


def buckets(config: Config) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the small model's parameters, in DDP's buckets of the model itself."""
    found: list[list[tuple[int, ...]]] = [[]]
    size, limit = 0, FIRST_BUCKET
    pairs = zip(shapes(config), shapes(small(config)), strict=True)
    for real, shrunk in reversed(list(pairs)):
        if size >= limit:
            found.append([])
            size, limit = 0, BUCKET
        found[-1].append(shrunk)
        size += 4 * math.prod(real)
    return found


def record(config: Config, jobs: Sequence[dict[str, str]]) -> list[Recorded]:
    """Return what the hooks ask of the device in each job: the recorder's arguments but buckets.

    Raises:
        Failed: the recorder has failed, or this is no checkout.
    """
    if not (ROOT / "tests").is_dir():
        raise Failed("--stand-in runs on the device of the tests: use a checkout of pycomm")
    shapes = {"buckets": buckets(config)}
    command = [sys.executable, "-m", RECORDER, *(json.dumps(job | shapes) for job in jobs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"the stand-in has failed:\n{done.stderr}")
    return [Recorded.parse(line) for line in done.stdout.splitlines()]


def scale_of(config: Config) -> float:
    """Return how many values the model has for one of the small model."""
    return parameters(config) / parameters(small(config))


def pace_of(config: Config) -> Pace:
    """Return the parts of a step without communication."""
    sizes = [sum(map(math.prod, bucket)) for bucket in buckets(config)]
    compute = FIRST + EACH * (len(sizes) - 1)
    return Pace(FIRST, compute, OPTIMIZER, sizes[-1] / sum(sizes))


def broken(recorded: Recorded, ratio: float, *, coded: bool = False) -> list[str]:
    """Return the goals of the engine that do not hold, one sentence each.

    Args:
        recorded: a step.
        ratio: what it takes, in parts of the shortest that the link allows.
        coded: it has the passes of a coded optimizer.
    """
    counts = recorded.summary()
    goals = {name: most + coded * PASSES.get(name, 0) for name, most in GOALS.items()}
    wrong = [
        f"{counts[name]:g} {name}, where {most} are the goal"
        for name, most in goals.items()
        if counts[name] > most
    ]
    if ratio > OVER:
        wrong.append(f"{ratio:.2f} of the bound, where {OVER} is the goal")
    return wrong


def steps(
    name: str, config: Config, methods: Sequence[str], rates: Sequence[str]
) -> Iterator[tuple[Row, list[str]]]:
    """Yield the row of each method on links of each rate, over an ordered carrier, and the goals
    that it misses.

    Args:
        name, config: of the model.
        methods: those of `CODECS`.
        rates: of the links.

    Raises:
        Failed: the recorder has failed, or this is no checkout.
    """
    steps = record(config, [{"codec": CODECS[one], "carrier": "ordered"} for one in methods])
    pace, count, scale = pace_of(config), parameters(config), scale_of(config)
    for rate, (codec, recorded) in itertools.product(rates, zip(methods, steps, strict=True)):
        speed = parse_rate(rate)[0]
        found = modelled(recorded, speed, scale)
        wire = wire_seconds(found.sent, speed)
        bound = pace.bound(wire)
        words = [f"{key}:{value:g}" for key, value in recorded.summary().items()]
        row = replace(
            describe("step", name, count, Method(f"stand-in, {codec}", "stand-in", codec=codec)),
            rate=rate,
            seconds=found.seconds,
            wire_bytes=found.sent,
            wire_seconds=wire,
            bound=bound,
            ratio=found.seconds / bound,
            parts=" ".join(words),
        )
        wrong = broken(recorded, row.ratio, coded=CODECS[codec].startswith("coded "))
        yield row, [f"{codec} at {rate}: {one}" for one in wrong]
