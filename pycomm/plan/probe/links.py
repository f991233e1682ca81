"""Measurements of a link between two ranks, and of the cost of more ranks than cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from pycomm.communicator import Communicator
from pycomm.plan.algorithms import Size, all_reduce
from pycomm.plan.cluster import FAR, Link
from pycomm.plan.codecs import CODINGS, NONE, Coding
from pycomm.plan.probe.codecs import Buffers, Codecs, way
from pycomm.plan.probe.ranks import PAUSE, Ranks, all_reduces, coded_all_reduces
from pycomm.plan.probe.result import ClusterProbe, Crowd

SHORT, FIRST, OF_FAR, LONGEST = 8, 1 << 20, 8 << 20, 64 << 20  # bytes of messages
SMALL = 64 << 10  # bytes of a buffer whose messages from all ranks fit the queues of a switch
WHOLE = CODINGS["topk:0.01"]
SHORT_CODINGS = CODINGS["int8"], CODINGS["int4"]
MANY = 256  # number of small messages in flight at once


def measure(
    ranks: Ranks, level: str, member: int, memory: float, budget: float
) -> tuple[Link, Communicator]:
    """Measure a link by short and long all-reduces of two ranks.

    A short one waits for one message each way. Two-shot between two ranks sends a buffer of b bytes
    once each way, folds it, and waits for two rounds; so the extra time of a longer buffer gives
    the rate. The core's time, less folding, gives its cost of a byte.
    """
    algos = {name: "auto" if level == "intra" else name for name in ("one_shot", "two_shot")}
    groups = {
        name: ranks.members(f"{level}-{name}", member, 2, algo) for name, algo in algos.items()
    }
    short = min(_short(groups["one_shot"], budget) for _ in range(3))
    group = groups["two_shot"]
    seconds, core = all_reduces(group, FIRST, 4)
    # The planner's formulas count the longer of link and core for each size, so buffers are long.
    # Where round trips are a good part of the first one's time, a longer one is needed at any rate.
    far = 2 * short >= FAR
    length, times = FIRST, max(3, min(20, round(budget / 4 / seconds)))
    while length < LONGEST and (
        3 * seconds * (2 * length / FIRST) < budget / 2 or (far and length < OF_FAR)
    ):
        length *= 2
    # Over a far link one call may take half as long again as the next, since a lost packet costs a
    # round trip and congestion control probes the path: the fastest calls show the rate.
    typical = min if far else statistics.median
    seconds, core = all_reduces(group, FIRST, times, typical=typical)
    longer, longer_core = seconds, core
    if length > FIRST:
        longer, longer_core = all_reduces(group, length, 3 if far else 5, typical=typical)
    rate, per_byte = FIRST / seconds, core / FIRST
    if longer > seconds:  # else other work has delayed the shorter one
        rate = (length - FIRST) / (longer - seconds)
    if length > FIRST:
        per_byte = (longer_core - core) / (length - FIRST)
    message = min(short / 2, _message(groups["one_shot"]))
    rested, _ = all_reduces(group, FIRST, 5, pause=PAUSE)
    link = Link(
        name="probed",
        rate=rate,
        latency=max(0.0, short - message),
        far=far,
        message=message if level == "inter" else 0.0,
        byte=max(0.0, per_byte - 1 / memory) if level == "inter" else 0.0,
        burst=max(0.0, seconds - rested) * rate if level == "inter" else 0.0,
    )
    return link, group


def _short(group: Communicator, budget: float) -> float:
    """Return the seconds of a short one. Two ranks on one core stay on it until they sleep."""
    time.sleep(PAUSE)
    return all_reduces(group, SHORT, max(5, round(40 * budget)))[0]


def with_rounds(link: Link, found: Codecs) -> Link:
    """Return the link with the observed wait in each round of an all-reduce."""
    return replace(link, latency=link.latency + max(0.0, found.late))


def _message(group: Communicator) -> float:
    """Return the seconds of one of many independent small messages each way."""
    peer, out = 1 - group.rank, bytearray(SHORT)
    samples = []
    for _ in range(5):
        group.barrier()
        begin = time.perf_counter()
        requests = [group.recv(bytearray(SHORT), peer) for _ in range(MANY)]
        requests += [group.send(out, peer) for _ in range(MANY)]
        for request in requests:
            request.wait()
        samples.append((time.perf_counter() - begin) / MANY)
    return min(samples)


def crowd(
    ranks: Ranks,
    members: int,
    found: ClusterProbe | None,
    buffers: Sequence[Buffers],
    budget: float,
) -> Crowd | None:
    """Measure a crowd by all-reduces of more ranks of a machine than it has cores.

    The core's time in a longer buffer, less folding, gives its cost of a byte; the time of short
    ones beyond the planner's prediction is the wait for a core, in each round. Codecs are slower
    than on a core of their own, since ranks change on it in the middle of their work: those that
    work on segments less than one that takes whole buffers, which caches no longer hold.

    Args:
        ranks: all of them call this.
        members: number of ranks that take part.
        found: measurements so far, on rank 0, which gets the result; the others get None.
        buffers: small and large ones.
        budget: seconds to take.
    """
    if ranks.rank >= members:
        return None
    group = ranks.members(f"crowd-{members}", ranks.rank, members, "two_shot")
    seconds, _ = all_reduces(group, FIRST, 2, pause=PAUSE)
    length = FIRST
    while length < LONGEST and 2 * seconds * (2 * length / FIRST) < budget:
        length *= 2
    times = max(3, min(5, round(budget / 3 / (seconds + PAUSE))))
    first = all_reduces(group, FIRST, times, pause=PAUSE)
    long = all_reduces(group, length, 3, pause=PAUSE) if length > FIRST else first
    near, far = buffers
    waits = [(NONE, SMALL // 4, all_reduces(group, SMALL, 5, pause=PAUSE)[0])]
    whole: list[float] = []
    for coding in 2 * (*SHORT_CODINGS, WHOLE):  # in turns, so each starts with the others' caches
        wall, _ = coded_all_reduces(group, near.values, near.numel, coding, 1)
        if coding.whole:
            whole.append(wall)
        else:
            waits.append((coding, near.numel, wall))
    numel = min(far.numel, length)  # payloads are far smaller
    far_whole, _ = coded_all_reduces(group, far.values, numel, WHOLE, 3)
    segmented = [
        (coding, coded_all_reduces(group, far.values, numel, coding, 3)[0])
        for coding in SHORT_CODINGS
    ]
    if found is None or found.inter is None:
        return None
    here = Crowd(members, found.inter.byte)
    if length > FIRST:
        here = moving(found, here, length, long[0], (long[1] - first[1]) / (length - FIRST))
    factors = [longer(found, here, coding, numel, wall) for coding, wall in segmented]
    here = replace(here, segmented=min(factors))  # other programs only make it larger
    late = [(wall - expected(found, here, coding, short)) / 2 for coding, short, wall in waits]
    here = replace(here, delay=max(0.0, statistics.median(late)))
    return replace(
        here,
        whole=longer(found, here, WHOLE, near.numel, statistics.median(whole)),
        far_whole=longer(found, here, WHOLE, numel, far_whole),
    )


def moving(found: ClusterProbe, crowd: Crowd, length: int, wall: float, core: float) -> Crowd:
    """Return the crowd with the cost of moving a byte, from the core seconds per byte.

    A waiting rank polls and keeps a core busy, so the cost is less if the all-reduce was faster.
    """
    plain = found.cluster(crowd.ranks).holding(length // 4).processor
    moved = 2 * (crowd.ranks - 1) / crowd.ranks
    costly = replace(crowd, byte=max(crowd.byte, (core - 1 / plain.memory) / moved))
    least, most = (expected(found, c, NONE, length // 4) for c in (crowd, costly))
    share = min(1.0, max(0.0, (wall - least) / (most - least))) if most > least else 1.0
    return replace(crowd, byte=crowd.byte + share * (costly.byte - crowd.byte))


def longer(found: ClusterProbe, crowd: Crowd, coding: Coding, numel: int, wall: float) -> float:
    """Return the factor by which a codec is slower in a crowd, from its all-reduce's time."""
    once, twice = (
        expected(found, replace(crowd, whole=f, far_whole=f, segmented=f), coding, numel)
        for f in (1.0, 2.0)
    )
    return min(4.0, max(1.0, 1 + (wall - once) / (twice - once)))


def expected(found: ClusterProbe, crowd: Crowd, coding: Coding, numel: int) -> float:
    """Return the predicted seconds of an all-reduce in such a crowd."""
    cluster = found.crowded(crowd).cluster(crowd.ranks)
    return all_reduce(cluster, coding, way(coding), Size.of(numel, coding)).seconds
