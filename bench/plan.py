"""The planner against the machine: predictions of `python -m pycomm.plan` beside measurements.

    python -m pycomm.bench plan --rate 1gbit --csv bench/results/plan-cpu.csv

For each link rate and number of ranks a `plan probe` calibrates the planner, since the cores of a
rented machine change within minutes. Then all-reduces without and with codecs, and the demo's
training steps, run on ranks in network namespaces, of which each has a core. Predictions use only
the probe, and for steps also the times of ranks that do not communicate. The last line has the
median and the worst error, and how often the codec predicted to be fastest was the fastest, or
within 10 % of it; the exit status is 3 if a promise of the planner is broken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from pycomm.bench.common import arguments
from pycomm.bench.common.harness import format_size
from pycomm.bench.common.report import JUDGED, Column, Report
from pycomm.bench.common.timing import calls_within, in_turns
from pycomm.bench.lab.jobs import ask, run
from pycomm.bench.lab.wan import lab_of
from pycomm.bench.step.rank import time_methods
from pycomm.bench.training.methods import Method
from pycomm.bench.training.train import Config, shapes
from pycomm.communicator import Communicator, Piece
from pycomm.plan import CODINGS, ClusterProbe, Model, of_tensors
from pycomm.plan.algorithms import Size, all_reduce
from pycomm.plan.prediction import step
from pycomm.plan.probe.codecs import way

CODECS = ("none", "int8", "int4", "topk:0.01")
MEDIAN, WORST, CLOSE, PICKED = 0.10, 0.30, 1.10, 0.95  # the promised accuracy
PROBED = 2  # ranks of a probe
BUDGET = 1.5  # seconds of the slowest codec at one size
FEWEST, MOST = 1, 5  # timed calls of a codec in a round
ROUNDS = 4  # so that a slow minute affects all sizes
PAUSE = 0.03  # before each call, so that a link's token bucket is full, as it is after computing
TURNS, TURN_SECONDS = 4, 1.0  # turns of a codec's training, and timed seconds of each


@dataclass(frozen=True)
class PlanCase:
    """A prediction and its measurement, in seconds."""

    kind: str
    rate: str
    ranks: int
    size: int
    codec: str
    algorithm: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def group(self) -> tuple[str, str, int, int]:
        """Return a key shared by cases that differ only in the codec."""
        return self.kind, self.rate, self.ranks, self.size


def probe(rate: str, path: Path) -> ClusterProbe:
    """Run one probe on links of a rate.

    Raises:
        Failed: a rank failed.
    """
    with lab_of(PROBED, rate) as lab:
        run(lab, [sys.executable, "-m", "pycomm.plan", "probe", "--out", str(path)])
    return ClusterProbe.read(path)


def model_of(alone: dict[str, Any], ranks: int) -> Model:
    """Return the demo's model, with the step times of ranks that do not communicate.

    Those ranks shared cores, so each of them had only a part of a core's seconds.
    """
    share = min(1.0, len(os.sched_getaffinity(0)) / ranks)
    parts = alone["parts"]
    return of_tensors(
        shapes(Config()),
        statistics.median(alone["seconds"]) * share,
        name="demo",
        bucket_mb=Method.bucket_mb,
        forward=parts["forward"] / sum(parts.values()),
        backward=parts["backward"] / sum(parts.values()),
    )


# ------------------------------------------------------------------- measuring


def all_reduces(sizes: Sequence[int], codecs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the median seconds of all-reduces, of the slowest rank."""
    with Communicator.from_env(transport="tcp", timeout=300) as group:
        source = np.random.default_rng(group.rank).standard_normal(max(sizes) // 4, np.float32)
        buffer, residual = np.empty_like(source), np.zeros_like(source)

        def rest(_: object) -> None:
            buffer[:] = source
            time.sleep(PAUSE)
            group.barrier()

        def call(size: int, codec: str) -> Any:
            data = buffer[: size // 4]
            if codec == "none":
                return lambda: group.all_reduce(data)
            # As `pycomm.compress` codes it: owners keep residuals of codecs with feedback, which
            # decide the algorithm between far ranks.
            coding = CODINGS[codec]
            owed = residual[: size // 4] if coding.feedback and coding.combine == "recode" else None
            piece = Piece(data.size, pycomm.codec(coding.spec), owner_residual=owed)
            return lambda: group.all_reduce_coded(data, [piece])

        def slowest(samples: Sequence[float]) -> list[float]:
            times = np.array(samples)
            group.all_reduce(times, "max")
            return [float(seconds) for seconds in times]

        calls = {size: {codec: call(size, codec) for codec in codecs} for size in sizes}
        found: dict[tuple[int, str], list[float]] = {}
        counts = {}
        for size in sizes:
            first = in_turns(calls[size], 1, settle=0, before=rest)
            most = max(slowest([first[codec][0] for codec in codecs]))
            counts[size] = calls_within(BUDGET / ROUNDS, most, FEWEST, MOST)
        for _, size in itertools.product(range(ROUNDS), sizes):
            # The first call of a turn finds buffers of another size in the caches.
            samples = in_turns(calls[size], counts[size] + 1, settle=0, before=rest)
            for codec in codecs:
                found.setdefault((size, codec), []).extend(slowest(samples[codec][1:]))
        for (size, codec), times in found.items():
            yield {"size": size, "codec": codec, "seconds": statistics.median(times)}


# -------------------------------------------------------------------- judging


def picks(cases: Sequence[PlanCase]) -> list[bool]:
    """Return for each group whether the codec predicted to be fastest was so, or close."""
    groups: dict[tuple[str, str, int, int], list[PlanCase]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    found = []
    for group in groups.values():
        chosen = min(group, key=lambda case: case.predicted)
        fastest = min(case.measured for case in group)
        found.append(chosen.measured <= CLOSE * fastest)
    return found


def accuracy(cases: Sequence[PlanCase]) -> tuple[float, float, list[bool]]:
    """Return the median and the worst error, and what `picks` returns."""
    errors = [abs(case.error) for case in cases]
    return statistics.median(errors), max(errors), picks(cases)


def judge(cases: Sequence[PlanCase]) -> bool:
    """Print the errors; return True if all promises hold."""
    median, worst, picked = accuracy(cases)
    share = sum(picked) / len(picked)
    print(
        f"{len(cases)} cases: median error {median:.1%} (promised {MEDIAN:.0%}), worst "
        f"{worst:.1%} ({WORST:.0%}), fastest codec picked in {share:.1%} of {len(picked)} "
        f"({PICKED:.0%})"
    )
    return median <= MEDIAN and worst <= WORST and share >= PICKED


def record(case: PlanCase) -> dict[str, Any]:
    """Return a case as a row of a table."""
    return asdict(case) | {"error": round(case.error, 4)}


COLUMNS = (
    Column("kind", -10),
    Column("rate", -8),
    Column("ranks", 5),
    Column("size", 5, lambda size: format_size(size) if size else "demo"),
    Column("codec", -10),
    Column("predicted", 12, ".2f", "predicted ms", 1e3),
    Column("measured", 11, ".2f", "measured ms", 1e3),
    Column("error", 8, ".1%"),
)


def measure(
    options: argparse.Namespace, rate: str, ranks: int, found: ClusterProbe
) -> Iterable[PlanCase]:
    """Yield all cases of one link rate and number of ranks."""
    with lab_of(ranks, rate) as lab:
        if "all_reduce" in options.kind:
            cluster = found.cluster(ranks)
            for row in ask(lab, all_reduces, options.size, CODECS):
                coding = CODINGS[row["codec"]]
                size = Size.of(row["size"] // 4, coding)
                predicted = all_reduce(cluster, coding, way(coding), size).seconds
                what = "all_reduce", rate, ranks, row["size"], coding.name, way(coding)
                yield PlanCase(*what, predicted, row["seconds"])
        if "step" in options.kind:
            cluster = found.cluster(ranks, compute_on_cores=True)
            methods = [Method(codec, codec=codec.replace("none", "")) for codec in CODECS]
            words = "cpu", TURNS, TURN_SECONDS, 0.0, ""
            alone, *rows = ask(lab, time_methods, Config(), methods, *words)
            model = model_of(alone, ranks)
            for row in rows:
                coding = CODINGS[row["method"]]
                predicted = step(model, cluster, coding, way(coding)).step
                what = "step", rate, ranks, 0, coding.name, way(coding)
                yield PlanCase(*what, predicted, statistics.median(row["seconds"]))


def main(argv: Sequence[str]) -> int:
    parser = arguments.Parser(prog="python -m pycomm.bench plan", description=__doc__)
    add = parser.add_argument
    what = "comma-separated; with round trip and loss: 200mbit@60ms@0.1%%"
    add("--rate", type=arguments.far_rates, default="100mbit,1gbit,10gbit", help=what)
    ranks = arguments.listed(arguments.nodes)
    add("--ranks", type=ranks, default="2", help="comma-separated, each with a core")
    what = "of all-reduces, comma-separated"
    add("--size", type=arguments.sizes, default="1M,4M,16M,64M", help=what)
    kinds = arguments.some_of("kind", ("all_reduce", "step"))
    add("--kind", type=kinds, default="all_reduce,step", help="comma-separated")
    arguments.add_csv(parser)
    options = parser.parse(argv)
    if min(options.size) < 4:
        parser.error(f"--size {min(options.size)}: want at least 4 bytes, a value")
    report, cases = Report(COLUMNS, options, hidden=("algorithm",)), []
    report.header()
    with tempfile.TemporaryDirectory() as folder:
        for rate, ranks in itertools.product(options.rate, options.ranks):
            found = probe(rate, Path(folder, "probe.json"))
            for case in measure(options, rate, ranks, found):
                report.add(record(case))
                cases.append(case)
    return 0 if judge(cases) else JUDGED
