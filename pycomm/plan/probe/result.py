"""Measurements of `plan probe`, as a file and as a cluster."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pycomm.plan.cluster import LINKS, Cluster, CodecRates, Link, Processor


@dataclass(frozen=True)
class ClusterProbe:
    """Links, cores and codecs, as measured by the ranks of a probe."""

    ranks: int
    inter: Link | None
    """Link between nodes; None: there was one node."""
    intra: Link | None
    """Link between ranks of a node; None: every node had one rank."""
    memory: float
    """Bytes per second that adding reads, on one core."""
    codecs: dict[str, CodecRates]
    far_memory: float
    far_codecs: dict[str, CodecRates]
    """Rates on larger buffers, which caches do not hold."""
    span: tuple[float, float]
    """Bytes of the buffers on a machine, for the smaller and the larger ones."""
    cores: int
    """Number of cores of one machine."""
    machines: int
    """Number of machines of the ranks; nodes may share one."""
    nodes: int
    device: str = ""

    @classmethod
    def read(cls, path: str | Path) -> ClusterProbe:
        """Read a file written by `plan probe`.

        Raises:
            ValueError: the file has other contents.
            OSError: it cannot be read.
        """
        try:
            return cls.of(json.loads(Path(path).read_text()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} was not written by `plan probe`: {error}") from None

    @classmethod
    def of(cls, record: dict[str, Any]) -> ClusterProbe:
        """Return the probe of a :meth:`record`.

        Raises:
            KeyError, TypeError: the value is no record of a probe.
        """
        found = dict(record)
        for level in ("inter", "intra"):
            found[level] = Link(**found[level]) if found[level] else None
        for name in ("codecs", "far_codecs"):
            found[name] = {codec: CodecRates(**rates) for codec, rates in found[name].items()}
        found["span"] = tuple(found["span"])
        return cls(**found)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.record(), indent=1) + "\n")

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def cluster(
        self, ranks: int, ranks_per_node: int = 1, *, compute_on_cores: bool = False
    ) -> Cluster:
        """Return a cluster of more or fewer ranks of the same kind.

        If all nodes of the probe shared one machine, as network namespaces do, those of the plan
        share it, too: more ranks then have fewer cores each, and wait for them.
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


def middle(probes: Sequence[ClusterProbe]) -> ClusterProbe:
    """Return the median of every figure over several probes of the same ranks."""
    return ClusterProbe.of(_middle([probe.record() for probe in probes]))


def _middle(records: Sequence[Any]) -> Any:
    first = records[0]
    if isinstance(first, dict):
        return {key: _middle([record[key] for record in records]) for key in first}
    if isinstance(first, tuple):
        return tuple(_middle(parts) for parts in zip(*records, strict=True))
    return statistics.median(records) if isinstance(first, float) else first
