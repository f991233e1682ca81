"""`plan probe`: measures links, cores and codecs of its ranks, on a LAN in under 30 seconds.

Without torchrun it starts two ranks on this machine; under torchrun every rank calls it. Two ranks
measure each level of links while the others wait; all ranks that have a core measure codecs at the
same time, since that is how they will be used.
"""

from __future__ import annotations

from collections.abc import Sequence

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.plan.cluster import Link
from pycomm.plan.probe import codecs, links
from pycomm.plan.probe.ranks import Ranks
from pycomm.plan.probe.result import ClusterProbe, cores_of_process, machine_of_process, middle

SECONDS = 2.2  # time for one level of links, in all turns
TURNS = 3
NUMELS = 1 << 18, 8 << 20  # sizes of the buffers of codecs; caches hold the first


def run(rank: int, size: int, effort: float = 1.0) -> ClusterProbe | None:
    """Measure; rank 0 gets the result, the others None.

    Everything is measured several times, some seconds apart, and the median counts: cores of a
    rented machine vary in speed.

    Args:
        rank: this rank.
        size: number of ranks.
        effort: share of the usual time and memory: less is quicker and less accurate.

    Raises:
        ValueError: there is only one rank.
    """
    if size < 2:
        raise ValueError("one rank has no links to probe: start two or more")
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
            levels[level], group = links.measure(ranks, level, int(rank != 0), memory, budget)
            pair = pair or group
        ranks.rest()
    machines, cores = ranks.gather(machine_of_process()), cores_of_process()
    before = machines[:rank].count(machines[rank])
    busy = before < max(2, cores)  # further ranks would only wait for a core
    measured = [codecs.measure(ranks, b, effort / TURNS, busy=busy) for b in buffers]
    inter = levels["inter"]
    if pair is not None and inter is not None:
        measured = [
            codecs.in_use(pair, inter, found, b, effort)
            for found, b in zip(measured, buffers, strict=True)
        ]
        inter = links.with_rounds(inter, measured[0])
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
