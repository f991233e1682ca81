"""Schedules: the all-reduces of docs/algorithms.md as tasks that encode, send and add."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pycomm.plan.algorithms import STAGE, Size, in_one_shot
from pycomm.plan.cluster import SEGMENT
from pycomm.plan.codecs import NONE, Coding
from pycomm.plan.sim.engine import SimTask
from pycomm.plan.sim.network import MOST_PIECES, Network

Tasks = list[SimTask]


class Schedule:
    """All-reduces over a network. Every method takes the tasks after which each member may start,
    and returns the tasks after which each has its result."""

    def __init__(self, network: Network, coding: Coding) -> None:
        self.net, self.coding = network, coding
        self._hold(1)

    def _hold(self, values: int) -> None:
        """Set the cores' rates to those for a buffer of that size."""
        processor = self.net.cluster.holding(values).processor
        self._memory = processor.memory
        self._rates = None if self.coding.exact else self.coding.rates(processor)

    def all_reduce(self, algorithm: str, size: Size, start: Tasks) -> Tasks:
        """Add an all-reduce among all ranks.

        Raises:
            KeyError: there is no such algorithm.
        """
        everybody = list(range(self.net.cluster.ranks))
        if len(everybody) == 1:
            return start
        self._hold(size.values)
        if self.coding.combine == "factors":
            return self._factors(algorithm, everybody, size, start)
        if algorithm == "hierarchical":
            return self._hierarchical(size, start)
        ways = {
            "one_shot": self.one_shot,
            "gather": self.one_shot,
            "two_shot": self.two_shot,
            "bruck": self.bruck,
            "ring": self.ring,
        }
        return ways[algorithm](everybody, size, start)

    # ------------------------------------------------------------ seconds of a core

    def _encode(self, size: float) -> float:
        return size / self._rates.encode if self._rates else 0.0

    def _decode(self, size: float) -> float:
        return size / self._rates.decode if self._rates else 0.0

    def _fold(self, n: int, size: float) -> float:
        """Return the seconds to reduce n contributions of `size` float32 bytes to one."""
        if not self._rates:
            return n * size / self._memory
        added = size / self._rates.decode + (n - 1) * size / self._rates.decode_add
        return added + 2 * size / self._memory

    def _check(self, start: Tasks, members: Sequence[int], size: float) -> Tasks:
        """Add the check that the result of a codec is finite."""
        if not self._rates:
            return start
        seconds = size / self._memory
        return [self.net.work(m, seconds, [s]) for m, s in zip(members, start, strict=True)]

    # ------------------------------------------------------------ flat

    def one_shot(self, members: Sequence[int], size: Size, start: Tasks) -> Tasks:
        """Send every rank's whole buffer, or its payload, to every other rank.

        What is coded again is sent in segments, for which all ranks do what owners do.
        """
        n, again = len(members), self._rates is not None and self.coding.combine != "gather"
        count = self._segments(members, 4.0 * size.values) if again else 1
        plain, wire = 4.0 * size.values / count, size.payload / count
        arrived: dict[tuple[int, int], Tasks] = {}
        for s in range(count):
            for i, m in enumerate(members):
                encoded = self.net.work(m, self._encode(plain), [start[i]])
                for k in range(n):
                    to = (i + k) % n
                    task = self.net.send(m, members[to], wire, [encoded]) if k else encoded
                    arrived.setdefault((to, s), []).append(task)
        seconds = self._fold(n, plain) if self._rates else n * wire / self._memory
        if again:
            seconds += self._encode(plain) + self._decode(plain)
        ended = [
            self.net.join([self.net.work(m, seconds, arrived[i, s]) for s in range(count)])
            for i, m in enumerate(members)
        ]
        return self._check(ended, members, 4.0 * size.values)

    def two_shot(self, members: Sequence[int], size: Size, start: Tasks) -> Tasks:
        """Send chunks to their owners in segments; each owner folds, encodes again and sends."""
        n = len(members)
        own = 4.0 * size.values / n
        count = self._segments(members, own)
        plain, wire = own / count, size.payload / n / count
        arrived: dict[tuple[int, int], Tasks] = {}
        for s in range(count):
            for i, m in enumerate(members):
                for k in range(1, n + 1):
                    owner = (i + k) % n
                    task = self.net.work(m, self._encode(plain), [start[i]])
                    if owner != i:
                        task = self.net.send(m, members[owner], wire, [task])
                    arrived.setdefault((owner, s), []).append(task)
        shown: list[Tasks] = [[] for _ in members]
        for s in range(count):
            for i, m in enumerate(members):
                seconds = self._fold(n, plain) + self._encode(plain)
                result = self.net.work(m, seconds, arrived[i, s])
                for k in range(n):
                    to, task = (i + k) % n, result
                    if k:
                        task = self.net.send(m, members[to], wire, [result])
                    shown[to].append(self.net.work(members[to], self._decode(plain), [task]))
        ended = [self.net.join(tasks) for tasks in shown]
        return self._check(ended, members, 4.0 * size.values)

    def _segments(self, members: Sequence[int], own: float) -> int:
        """Return the number of segments of a chunk. Slow links have small ones, of which some show
        how their times overlap; more would only cost events."""
        local = self.net.cluster.ranks_per_node
        near = len({member // local for member in members}) == 1
        link = self.net.cluster.intra if near else self.net.cluster.inter
        return max(1, min(round(own / link.segment), max(MOST_PIECES, round(own / SEGMENT))))

    def bruck(self, members: Sequence[int], size: Size, start: Tasks) -> Tasks:
        """Double each rank's data in each round; every rank folds all of it."""
        n, have, now = len(members), 1, list(start)
        while have < n:
            count = min(have, n - have)
            now = [
                self.net.join(
                    [now[i], self.net.send(members[j], m, count * size.payload, [now[j]])]
                )
                for i, m in enumerate(members)
                for j in [(i + have) % n]
            ]
            have += count
        seconds = (n + 1) * size.payload / self._memory
        return [self.net.work(m, seconds, [now[i]]) for i, m in enumerate(members)]

    def ring(self, members: Sequence[int], size: Size, start: Tasks) -> Tasks:
        """Send chunks around twice, in segments: once to reduce them, once to distribute them."""
        n = len(members)
        own = size.payload / n
        count = self._segments(members, own)
        segment = own / count
        ended: list[Tasks] = [[] for _ in members]
        for chunk in range(n):
            for _ in range(count):
                at = start[chunk]
                for turn in range(2 * (n - 1)):
                    source, to = (chunk + turn) % n, (chunk + turn + 1) % n
                    at = self.net.send(members[source], members[to], segment, [at])
                    if turn < n - 1:
                        at = self.net.work(members[to], 2 * segment / self._memory, [at, start[to]])
                    ended[to].append(at)
        return [self.net.join(tasks) for tasks in ended]

    def _factors(self, algorithm: str, members: Sequence[int], size: Size, start: Tasks) -> Tasks:
        """Add two exact all-reduces of half the payload, with matrix products around them."""
        plain, half = 4.0 * size.values, Size(int(size.payload / 8), size.payload / 2)
        exact = Schedule(self.net, NONE)
        now = start
        for seconds in (self._encode(plain), 0.0):
            now = [self.net.work(m, seconds, [now[i]]) for i, m in enumerate(members)]
            now = exact.all_reduce(algorithm, half, now)
        return [self.net.work(m, self._decode(plain), [now[i]]) for i, m in enumerate(members)]

    # ------------------------------------------------------------ levels

    def _hierarchical(self, size: Size, start: Tasks) -> Tasks:
        """Reduce exactly in the node, each rank's shard between nodes, then gather in the node."""
        stages = max(1, math.ceil(size.plain / STAGE)) if self.coding.exact else 1
        part = size.part(stages)
        ended: list[Tasks] = [[] for _ in start]
        for _ in range(stages):
            for rank, task in enumerate(self._stage(part, start)):
                ended[rank].append(task)
        return [self.net.join(tasks) for tasks in ended]

    def _stage(self, size: Size, start: Tasks) -> Tasks:
        cluster, now = self.net.cluster, list(start)
        local, nodes = cluster.ranks_per_node, cluster.nodes
        shard = size.part(local)
        for node in range(nodes):
            members = [node * local + i for i in range(local)]
            now[node * local : (node + 1) * local] = self._node(members, size, now, True)
        for place in range(local):
            members = [node * local + place for node in range(nodes)]
            # Between two nodes one shot sends as many bytes.
            one = nodes == 2 and in_one_shot(self.coding, cluster.inter)
            way = self.one_shot if one or self.coding.combine == "gather" else self.two_shot
            ended = way(members, shard, [now[m] for m in members])
            for m, task in zip(members, ended, strict=True):
                now[m] = task
        for node in range(nodes):
            members = [node * local + i for i in range(local)]
            now[node * local : (node + 1) * local] = self._node(members, size, now, False)
        return now

    def _node(self, members: Sequence[int], size: Size, now: Tasks, reduces: bool) -> Tasks:
        """Add an exact reduce-scatter or all-gather in a node."""
        plain = size.plain / len(members)
        seconds = len(members) * plain / self._memory if reduces else 0.0
        result = []
        for m in members:
            came = [self.net.send(other, m, plain, [now[other]]) for other in members if other != m]
            result.append(self.net.work(m, seconds, [*came, now[m]]))
        return result
