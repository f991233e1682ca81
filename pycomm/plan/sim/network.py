"""Cores, threads and lines of a cluster, for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pycomm.plan.cluster import SEGMENT, Cluster
from pycomm.plan.sim.engine import Cores, EventClock, SimTask, Thread, Transfer, Way

MOST_PIECES = 16
"""Most pieces of a simulated message: a core and a line overlap to within a sixteenth of it."""


class Network:
    """The cores and lines of a cluster. Each node has an outgoing and an incoming line, and so has
    each rank inside its node.

    Args:
        cluster: the cluster.
        slow_nodes: factors by which the links of some nodes are slower than the others.
        slow_nodes: factors by which the links of some nodes are slower than the others.
    """

    def __init__(self, cluster: Cluster, slow_nodes: Mapping[int, float] | None = None) -> None:
        self.cluster, self.engine = cluster, EventClock()
        slow = slow_nodes or {}
        ranks, machine = range(cluster.ranks), cluster.machine
        cores = [
            Cores(self.engine, cluster.cores * machine) for _ in range(-(-cluster.ranks // machine))
        ]
        self.communicating = [Thread(cores[r // machine]) for r in ranks]
        own = [Thread(cores[r // machine]) for r in ranks]
        device = [Thread(Cores(self.engine, 1.0)) for _ in ranks]
        self.computing = own if cluster.compute_on_cores else device
        inter = cluster.inter
        ways = (inter.rate, inter.receive or inter.rate)
        self._node_lines = [
            [
                Transfer(self.engine, rate / slow.get(node, 1.0), inter.burst)
                for node in range(cluster.nodes)
            ]
            for rate in ways
        ]
        self._rank_lines = [self._inside(cluster) for _ in range(2)]
        self.sent = [0.0] * cluster.ranks

    def _inside(self, cluster: Cluster) -> list[Transfer]:
        """Return one direction of each rank's line in its node, or of the node's shared one."""
        local, rate = cluster.ranks_per_node, cluster.intra.rate
        if not cluster.intra.shared:
            return [Transfer(self.engine, rate) for _ in range(cluster.ranks)]
        buses = [Transfer(self.engine, rate) for _ in range(cluster.nodes)]
        return [buses[rank // local] for rank in range(cluster.ranks)]

    def join(self, after: Iterable[SimTask]) -> SimTask:
        """Return a task that ends when all others have."""
        return self.engine.task(None, 0.0, after)

    def work(self, rank: int, seconds: float, after: Iterable[SimTask]) -> SimTask:
        """Return a task of core seconds on a rank's communicating thread."""
        place = self.communicating[rank] if seconds > 0 else None
        return self.engine.task(place, seconds, after)

    def send(self, source: int, target: int, size: float, after: Iterable[SimTask]) -> SimTask:
        """Return the task of a message, which ends when the target has received it."""
        local = self.cluster.ranks_per_node
        near = source // local == target // local and local > 1
        link = self.cluster.intra if near else self.cluster.inter
        out, into = self._rank_lines if near else self._node_lines
        ends = (source, target) if near else (source // local, target // local)
        if not near or self.cluster.nodes == 1:
            self.sent[source] += size
        # A core that moves bytes does so while the line is busy with earlier ones.
        pieces = 1 if link.byte == 0 else min(MOST_PIECES, max(1, round(size / SEGMENT)))
        way = Way(out[ends[0]], into[ends[1]], link.latency + link.late(1))
        ended, after = [], list(after)
        for piece in range(pieces):
            touch = size * link.byte / pieces + (link.message if piece == 0 else 0.0)  # both ends
            ready = self.work(source, touch / 2, after)
            came = self.engine.task(way, size / pieces, [ready])
            ended.append(self.work(target, touch / 2, [came]))
        return ended[0] if pieces == 1 else self.join(ended)
