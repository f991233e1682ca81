"""`plan probe`: measures links, cores and codecs of its ranks, on a LAN in under 30 seconds.

Without torchrun it starts two ranks on this machine; under torchrun every rank calls it. Two ranks
measure each level of links while the others wait; all ranks that have a core measure codecs at the
same time, since that is how they will be used.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.env import host
from pycomm.plan.cluster import FAR, Link
from pycomm.plan.probe import codecs
from pycomm.plan.probe.ranks import PAUSE, Ranks, all_reduces
from pycomm.plan.probe.result import ClusterProbe, middle

SECONDS = 2.2  # time for one level of links, in all turns
TURNS = 3
NUMELS = 1 << 18, 8 << 20  # sizes of the buffers of codecs; caches hold the first


def run(rank: int, size: int, effort: float = 1.0) -> ClusterProbe | None:
    """Measure; rank 0 gets the result, the others None.

    Everything is measured several times, some seconds apart, and the median counts: cores of a
    rented machine vary in speed.

    Args:
        rank: this rank.
        size: number of ranks, two or more.
        effort: share of the usual time and memory, at most 1: less is quicker and less accurate.
    """
    ranks = Ranks(rank, size)
    sizes = [max(1 << 16, int(numel * effort) >> 16 << 16) for numel in NUMELS]
    buffers = [codecs.Buffers(numel, rank) for numel in sizes]
    found = [_turn(ranks, buffers, effort) for _ in range(TURNS)]
    ranks.rest()  # after this no rank needs the store
    return middle([probe for probe in found if probe is not None]) if rank == 0 else None


def _turn(ranks: Ranks, buffers: Sequence[codecs.Buffers], effort: float) -> ClusterProbe | None:
    rank, size, nodes = ranks.rank, ranks.size, ranks.nodes()
    partners = {
        "inter": next((r for r in range(size) if nodes[r] != nodes[0]), None),
        "intra": next((r for r in range(1, size) if nodes[r] == nodes[0]), None),
    }
    budget = SECONDS * effort / TURNS
    memory = buffers[0].memory()
    levels: dict[str, Link | None] = {}
    pair: Communicator | None = None
    for level, partner in partners.items():
        levels[level] = None
        if partner is not None and rank in (0, partner):
            levels[level], group = measure_link(ranks, level, int(rank != 0), memory, budget)
            pair = pair or group
        ranks.rest()
    machines, cores = ranks.gather(host()), len(os.sched_getaffinity(0))
    before = machines[:rank].count(machines[rank])
    busy = before < max(2, cores)  # further ranks would only wait for a core
    measured = [codecs.measure(ranks, b, effort / TURNS, busy=busy) for b in buffers]
    inter = levels["inter"]
    if pair is not None and inter is not None:
        measured = [
            codecs.in_use(pair, inter, found, b, effort)
            for found, b in zip(measured, buffers, strict=True)
        ]
        # With what each round of an all-reduce was seen to wait.
        inter = replace(inter, latency=inter.latency + max(0.0, measured[0].late))
    ranks.rest()
    if rank > 0:
        return None
    here = min(max(2, cores), machines.count(machines[0]))
    return ClusterProbe(
        ranks=size,
        inter=inter,
        intra=levels["intra"],
        memory=measured[0].memory,
        codecs=measured[0].rates,
        far_memory=measured[1].memory,
        far_codecs=measured[1].rates,
        span=(4.0 * here * buffers[0].numel, 4.0 * here * buffers[1].numel),
        cores=cores,
        machines=len(set(machines)),
        nodes=len(set(nodes)),
        device=_C.simd_level(),
    )


SHORT, FIRST, OF_FAR, LONGEST = 8, 1 << 20, 8 << 20, 64 << 20  # bytes of messages
MANY = 256  # number of small messages in flight at once


def measure_link(
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
