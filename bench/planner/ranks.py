"""Ranks of validate_plan.py: all-reduces of every size and codec in turns.

steps.py does the training. Rank 0 writes one JSON object per case to a file.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import pycomm
from pycomm.bench.planner.log import write
from pycomm.communicator import Communicator, Piece
from pycomm.plan.codecs import CODINGS, Coding

BUDGET = 1.5  # seconds per case, unless the minimum number of calls takes longer
FEWEST, MOST = 2, 20
ROUNDS = 4
PAUSE = 0.03  # before each call, so that a link's token bucket is full, as it is after computing


def piece(coding: Coding, residual: np.ndarray[Any, Any]) -> Piece:
    """Return a buffer as `pycomm.compress` codes it: owners keep residuals of codecs with feedback.

    They decide the algorithm between far ranks.
    """
    owed = coding.feedback and coding.combine == "recode"
    codec = pycomm.codec(coding.spec)
    return Piece(residual.size, codec, owner_residual=residual if owed else None)


def all_reduces(folder: str, sizes: Sequence[int], codecs: Sequence[str], log: str) -> None:
    """Measure the median seconds of all-reduces, of the slowest rank; see :func:`turns`."""
    cases = list(itertools.product(sizes, codecs))
    with Communicator.from_env(folder, transport="tcp", timeout=300) as group:
        source = np.random.default_rng(group.rank).standard_normal(max(sizes) // 4, np.float32)
        buffer, residual = np.empty_like(source), np.zeros_like(source)

        def call(size: int, codec: str) -> float:
            data = buffer[: size // 4]
            data[:] = source[: size // 4]
            pieces = [] if codec == "none" else [piece(CODINGS[codec], residual[: size // 4])]
            time.sleep(PAUSE)
            group.barrier()
            begin = time.perf_counter()
            if pieces:
                group.all_reduce_coded(data, pieces)
            else:
                group.all_reduce(data)
            return time.perf_counter() - begin

        first = np.array([call(*case) for case in cases])
        group.all_reduce(first, "max")
        counts = [max(FEWEST, min(MOST, int(BUDGET / seconds))) for seconds in first]
        samples: list[list[float]] = [[] for _ in cases]
        for case, counted in turns(counts, len(codecs)):
            seconds = call(*cases[case])
            if counted:
                samples[case].append(seconds)
        for (size, codec), mine in zip(cases, samples, strict=True):
            slowest = np.array(mine)
            group.all_reduce(slowest, "max")
            if group.rank == 0:
                write(log, size=size, codec=codec, seconds=statistics.median(slowest.tolist()))


def turns(counts: Sequence[int], codecs: int) -> Iterable[tuple[int, bool]]:
    """Yield the next case and whether it counts, each case as often as its count says.

    The sizes come in several rounds, so that a slow minute affects all of them, and in each round
    the codecs of a size take turns. Cases with many calls get one more call first, which does not
    count, since buffers of another size have evicted theirs from the caches.
    """
    for turn in range(ROUNDS):
        for size in range(0, len(counts), codecs):
            here = range(size, size + codecs)
            times = {i: (turn + 1) * counts[i] // ROUNDS - turn * counts[i] // ROUNDS for i in here}
            yield from ((i, False) for i in here if counts[i] == MOST)
            for k in range(max(times.values())):
                yield from ((i, True) for i in here if k < times[i])


def main(words: str) -> int:
    """Run the measurement that validate_plan.py requests as JSON."""
    asked = json.loads(words)
    if asked.pop("kind") == "all_reduces":
        all_reduces(**asked)
    else:
        from pycomm.bench.planner import steps as plan_steps  # needs torch

        plan_steps.run(**asked)
    return 0
