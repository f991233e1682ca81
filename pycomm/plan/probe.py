"""`plan probe`: measures links, cores and codecs of the ranks it runs on, in under 30 seconds.

Started alone it starts two ranks on this machine; under torchrun every rank calls it, on nodes that
share a folder. Two ranks measure each level of links, while the others wait; all ranks that have a
core measure codecs at the same time, since that is how they will be used. Where network namespaces
of one machine are the nodes, the ranks that have no core of their own then show what that costs.
"""

from __future__ import annotations

from pathlib import Path

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.plan import probe_codecs, probe_links
from pycomm.plan.cluster import Link
from pycomm.plan.probe_ranks import Ranks
from pycomm.plan.probed import Probe, cores_of_process, machine_of_process

SECONDS = 2.5  # of one level of links
NUMELS = 1 << 18, 16 << 20  # of the buffers that codecs work on: caches hold the first


def run(folder: Path, rank: int, size: int, effort: float = 1.0) -> Probe | None:
    """Measure; rank 0 gets the result, the others None.

    Args:
        folder: where the ranks meet; shared by all, and new.
        rank: our number.
        size: how many ranks there are.
        effort: share of the usual time and memory: less is quicker, and worse.

    Raises:
        ValueError: there is only one rank.
    """
    if size < 2:
        raise ValueError("one rank has no links to probe: start two or more")
    ranks = Ranks(folder, rank, size)
    nodes = ranks.nodes()
    partners = {
        "inter": next((r for r in range(size) if nodes[r] != nodes[0]), None),
        "intra": next((r for r in range(1, size) if nodes[r] == nodes[0]), None),
    }
    sizes = [max(1 << 16, int(numel * effort) >> 16 << 16) for numel in NUMELS]
    memory = probe_codecs.memory(sizes[0])
    links: dict[str, Link | None] = {}
    pair: Communicator | None = None
    for level, partner in partners.items():
        links[level] = None
        if partner is not None and rank in (0, partner):
            member, budget = int(rank != 0), SECONDS * effort
            links[level], group = probe_links.measure(ranks, level, member, memory, budget)
            pair = pair or group
        ranks.rest(level)
    machines, cores = ranks.gather("machine", machine_of_process()), cores_of_process()
    before = machines[:rank].count(machines[rank])
    busy = before < max(2, cores)  # those beyond would only wait for a core
    measured = [probe_codecs.measure(ranks, numel, effort, busy=busy) for numel in sizes]
    inter = links["inter"]
    if pair is not None and inter is not None:
        measured = [probe_codecs.in_use(pair, inter, found, effort) for found in measured]
    ranks.rest("in use")
    found = None
    if rank == 0:
        here = min(max(2, cores), machines.count(machines[0]))
        found = Probe(
            ranks=size,
            inter=inter,
            intra=links["intra"],
            memory=measured[0].memory,
            codecs=measured[0].rates,
            far_memory=measured[1].memory,
            far_codecs=measured[1].rates,
            span=(4.0 * here * sizes[0], 4.0 * here * sizes[1]),
            cores=cores,
            machines=len(set(machines)),
            nodes=len(set(nodes)),
            device=_C.simd_level(),
        )
    if len(set(machines)) < len(set(nodes)) == size:
        found = _crowds(ranks, cores, found, SECONDS * effort)
    ranks.group.barrier()  # then nobody needs the store any more
    return found


def _crowds(ranks: Ranks, cores: int, found: Probe | None, budget: float) -> Probe | None:
    """Twice as many ranks as cores, four times as many, and so on."""
    members = 2 * cores
    while members <= ranks.size:
        crowd = probe_links.crowd(ranks, members, found, budget)
        if found is not None and crowd is not None:
            found = found.crowded(crowd)
        ranks.rest(f"crowd of {members}")
        members *= 2
    return found
