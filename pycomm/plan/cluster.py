"""What a plan is for: links, processors, and how ranks sit on them.

All figures are of one direction of a link or of one core, in bytes and seconds. Prices of TCP are
those of ``csrc/collectives/select.cpp``; the presets of hardware are what its sellers promise less
what protocols take, meant for a first answer. ``plan probe`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pycomm.plan import units

GOODPUT = 0.95
"""Of a line's bits that are TCP's payload: frames of 1538 bytes carry 1448."""


@dataclass(frozen=True)
class Link:
    """A link of each node, or inside a node of each rank. It is full duplex."""

    name: str
    rate: float
    """bytes per second, each way"""
    latency: float
    """seconds from a send to the arrival of an empty message"""
    message: float = 0.0
    """seconds of a processor to send and to receive one message"""
    byte: float = 0.0
    """seconds of a processor to send and to receive one byte; 0 where a device does it"""
    burst: float = 0.0
    """bytes that pass at once after a pause, as a token bucket lets them"""

    @classmethod
    def of(cls, text: str, latency: float | None = None) -> Link:
        """A preset ("10gbe", "nvlink", "wan"), or TCP of a rate ("1gbit", "3GB/s").

        A rate in bits is the line's, of which headers take 5 %; one in bytes is what arrives.

        Raises:
            ValueError: neither.
        """
        known = LINKS.get(text.lower())
        if known is None:
            try:
                rate, bits = units.parse_rate(text)
            except ValueError as error:
                raise ValueError(f"{error}; or one of {', '.join(LINKS)}") from None
            known = replace(LINKS["10gbe"], name=text, rate=rate * (GOODPUT if bits else 1.0))
            known = replace(known, latency=LATENCY_OF_TCP)
        return known if latency is None else replace(known, latency=latency)


LATENCY_OF_TCP = 50e-6
_TCP = {"message": 8e-6, "byte": 0.8e-9}
LINKS: dict[str, Link] = {
    "wan": Link("wan", GOODPUT * 100e6 / 8, 20e-3, **_TCP),
    "1gbe": Link("1gbe", GOODPUT * 1e9 / 8, 50e-6, **_TCP),
    "10gbe": Link("10gbe", GOODPUT * 10e9 / 8, 30e-6, **_TCP),
    "25gbe": Link("25gbe", GOODPUT * 25e9 / 8, 20e-6, **_TCP),
    "100gbe": Link("100gbe", GOODPUT * 100e9 / 8, 10e-6),  # RDMA: the card moves the bytes
    "pcie4": Link("pcie4", 22e9, 5e-6),
    "nvlink": Link("nvlink", 400e9, 3e-6),
    "shm": Link("shm", 8e9, 1e-6),
}


@dataclass(frozen=True)
class Rates:
    """What one core, or one device, does with a codec: float32 bytes per second."""

    encode: float
    decode: float
    decode_add: float
    encode_fed: float
    """encoding with error feedback: reads and writes a residual besides"""
    measured: bool = False

    def times(self, factor: float) -> Rates:
        """All of them faster by a factor."""
        return Rates(
            encode=factor * self.encode,
            decode=factor * self.decode,
            decode_add=factor * self.decode_add,
            encode_fed=factor * self.encode_fed,
            measured=self.measured,
        )

    def toward(self, other: Rates, share: float) -> Rates:
        """Between the two: seconds per byte are a share of the way to the other's."""

        def between(mine: float, others: float) -> float:
            return 1 / ((1 - share) / mine + share / others)

        return Rates(
            encode=between(self.encode, other.encode),
            decode=between(self.decode, other.decode),
            decode_add=between(self.decode_add, other.decode_add),
            encode_fed=between(self.encode_fed, other.encode_fed),
            measured=self.measured,
        )


@dataclass(frozen=True)
class Processor:
    """What encodes, adds and decodes."""

    name: str
    memory: float
    """bytes per second that a pass over memory reads and writes"""
    rates: Mapping[str, Rates] = field(default_factory=dict)
    """of codecs by name, where they were measured"""
    is_core: bool = True
    """a core of a CPU; else a device on which memory holds codecs back"""
    far: Processor | None = None
    """the same where no cache holds the buffers"""
    span: tuple[float, float] = (0.0, 0.0)
    """bytes of buffers on a machine of which figures are these, and the far ones"""

    def at(self, footprint: float) -> Processor:
        """The same with that many bytes of buffers: between near and far, as the logarithm is."""
        if self.far is None:
            return self
        low, high = self.span
        share = min(1.0, max(0.0, math.log(footprint / low) / math.log(high / low)))
        memory = 1 / ((1 - share) / self.memory + share / self.far.memory)
        known = self.rates.keys() & self.far.rates.keys()
        rates = {name: self.rates[name].toward(self.far.rates[name], share) for name in known}
        return replace(self, memory=memory, rates=rates, far=None)

    def slower(self, name: str, factor: float, far: float) -> Processor:
        """The same, where a codec takes so many times longer, here and where no cache holds it."""
        known = {**self.rates, name: self.rates[name].times(1 / factor)}
        return replace(self, rates=known, far=self.far and self.far.slower(name, far, far))

    def fed(self, name: str, rates: Rates) -> Processor:
        """The same, where a codec's encoding takes what it takes with error feedback."""
        mine = self.rates.get(name, rates)
        known = {**self.rates, name: replace(mine, encode=mine.encode_fed)}
        return replace(self, rates=known, far=self.far and self.far.fed(name, rates))


# The bandwidths of a core of a server, and of an accelerator with HBM of which kernels reach 60 %.
PROCESSORS = {
    "core": Processor("core", 16e9),
    "gpu": Processor("gpu", 1.2e12, is_core=False),
}


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes of equal size."""

    ranks: int
    inter: Link
    """between nodes; ranks of a node share it"""
    ranks_per_node: int = 1
    intra: Link = LINKS["shm"]
    processor: Processor = PROCESSORS["core"]
    cores: float = 2.0
    """that a rank has for itself. Less than 2: its communication slows its computing"""
    compute_on_cores: bool = False
    """training, too, runs on these cores and not on a device of its own"""
    ranks_per_machine: int = 0
    """ranks that share cores: 0 is those of a node; more where nodes are namespaces of a machine"""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ValueError("a cluster has at least one rank, and a node at least one")
        if self.ranks % self.ranks_per_node:
            raise ValueError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}: choose a multiple"
            )
        if self.cores <= 0:
            raise ValueError("cores must be above 0")

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def machine(self) -> int:
        """Ranks that share cores."""
        return self.ranks_per_machine or self.ranks_per_node

    @property
    def levels(self) -> bool:
        """Several nodes of several ranks."""
        return self.nodes > 1 and self.ranks_per_node > 1

    @property
    def slowest(self) -> Link:
        """The link that an algorithm without levels is held back by."""
        return self.inter if self.nodes > 1 else self.intra

    def holding(self, values: float) -> Cluster:
        """The same, while every rank works on a buffer of so many float32."""
        if self.processor.far is None:
            return self
        footprint = 4.0 * max(1.0, values) * self.machine
        return replace(self, processor=self.processor.at(footprint))

    @property
    def slowdown(self) -> float:
        """How many times longer work takes while ranks wait for each other's cores."""
        return max(1.0, 1.0 / self.cores)
