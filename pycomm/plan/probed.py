"""What `plan probe` has measured, as a file and as a cluster."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pycomm.plan.cluster import LINKS, Cluster, Link, Processor, Rates
from pycomm.plan.codecs import CODINGS


@dataclass(frozen=True)
class Crowd:
    """More ranks than cores of a machine, which talk over links of their own."""

    ranks: int
    byte: float
    """seconds of a core to send and to receive one byte"""
    delay: float = 0.0
    """seconds by which a message is later than on a core of one's own"""
    whole: float = 1.0
    """how many times longer codecs take that have no segments"""
    far_whole: float = 1.0
    """and on larger buffers"""

    def toward(self, other: Crowd, ranks: int) -> Crowd:
        """A number of ranks between the two, or beyond: there nothing falls below what it can be,
        however much less the larger crowd was seen to take."""
        share = (ranks - self.ranks) / (other.ranks - self.ranks)

        def between(mine: float, others: float) -> float:
            return mine + share * (others - mine)

        return Crowd(
            ranks,
            max(min(self.byte, other.byte), between(self.byte, other.byte)),
            max(0.0, between(self.delay, other.delay)),
            max(1.0, between(self.whole, other.whole)),
            max(1.0, between(self.far_whole, other.far_whole)),
        )


@dataclass(frozen=True)
class Probe:
    """Links, cores and codecs of the ranks that it ran on."""

    ranks: int
    inter: Link | None
    """between nodes; None: there was one node"""
    intra: Link | None
    """between ranks of a node; None: every node had one rank"""
    memory: float
    """bytes per second that adding reads, on one core"""
    codecs: dict[str, Rates]
    far_memory: float
    far_codecs: dict[str, Rates]
    """the same on larger buffers, which caches do not hold"""
    span: tuple[float, float]
    """bytes of those buffers on a machine, of the smaller and the larger ones"""
    cores: int
    """of one machine"""
    machines: int
    """that the ranks ran on; nodes may share one"""
    nodes: int
    crowds: tuple[Crowd, ...] = ()
    """of more and more ranks"""
    device: str = ""

    @classmethod
    def read(cls, path: str | Path) -> Probe:
        """Read a file of `plan probe`.

        Raises:
            ValueError: it is something else.
            OSError: it cannot be read.
        """
        try:
            return cls.of(json.loads(Path(path).read_text()))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} was not written by `plan probe`: {error}") from None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Probe:
        """From what :meth:`record` gave.

        Raises:
            KeyError, TypeError: it gave something else.
        """
        found = dict(record)
        for level in ("inter", "intra"):
            found[level] = Link(**found[level]) if found[level] else None
        for name in ("codecs", "far_codecs"):
            found[name] = {codec: Rates(**rates) for codec, rates in found[name].items()}
        found["span"] = tuple(found["span"])
        found["crowds"] = tuple(Crowd(**crowd) for crowd in found.get("crowds", ()))
        return cls(**found)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.record(), indent=1) + "\n")

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def crowded(self, crowd: Crowd) -> Probe:
        """With one more of them, larger than those before."""
        return replace(self, crowds=(*self.crowds, crowd))

    def _crowd(self, ranks: int) -> Crowd | None:
        """As many ranks of one machine with links of their own; None: each has a core."""
        crowds = [crowd for crowd in self.crowds if crowd.ranks > self.cores]
        if self.inter is None or not crowds or ranks <= self.cores:
            return None
        known = [Crowd(self.cores, self.inter.byte), *crowds]
        place = next((i for i, c in enumerate(known) if c.ranks >= ranks), len(known) - 1)
        return known[place - 1].toward(known[place], ranks)

    def cluster(
        self, ranks: int, ranks_per_node: int = 1, *, compute_on_cores: bool = False
    ) -> Cluster:
        """More or fewer ranks of the same kind.

        Where all nodes of the probe shared one machine, as network namespaces do, those of the
        plan share it, too: more ranks then have fewer cores each, and wait for them.
        """
        ranks_per_machine = ranks_per_node
        if self.machines < self.nodes:
            ranks_per_machine = max(ranks_per_node, round(ranks / self.machines))
        name = self.device or "probed"
        far = Processor(name, self.far_memory, self.far_codecs)
        processor = Processor(name, self.memory, self.codecs, far=far, span=self.span)
        inter = self.inter or self.intra
        intra = self.intra or LINKS["shm"]
        assert inter is not None
        crowd = self._crowd(ranks_per_machine) if ranks_per_machine > ranks_per_node else None
        if crowd:
            inter = replace(inter, byte=crowd.byte, latency=inter.latency + crowd.delay)
            for coding in CODINGS.values():
                if coding.whole and coding.name in processor.rates:
                    processor = processor.slower(coding.name, crowd.whole, crowd.far_whole)
        return Cluster(
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            inter=inter,
            intra=intra,
            processor=processor,
            cores=self.cores / ranks_per_machine,
            compute_on_cores=compute_on_cores,
            ranks_per_machine=ranks_per_machine,
        )


def middle(probes: Sequence[Probe]) -> Probe:
    """Of several of the same ranks: of every figure the median."""
    return Probe.of(_middle([probe.record() for probe in probes]))


def _middle(records: Sequence[Any]) -> Any:
    first = records[0]
    if isinstance(first, dict):
        return {key: _middle([record[key] for record in records]) for key in first}
    if isinstance(first, tuple):
        return tuple(_middle(parts) for parts in zip(*records, strict=True))
    return statistics.median(records) if isinstance(first, float) else first


def cores_of_process() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_of_process() -> str:
    """The same for all processes of a machine, whatever their container or namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
