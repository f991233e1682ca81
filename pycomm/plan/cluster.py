"""Model of a cluster: links, processors, and the ranks on them.

All figures are for one direction of a link or for one core, in bytes and seconds. TCP costs are
those of ``csrc/collectives/common/cost.cpp``. The presets of hardware are vendors' figures less
protocol overhead, meant for a first estimate; ``plan probe`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

from pycomm import units

Mover = Literal["tcp", "dma"]
"""The mover of a link's bytes: a core, through TCP; or a device of each rank or node (an RDMA card,
NVLink, a copy engine)."""

GOODPUT = 0.95
"""Share of a line's bits that is TCP payload: frames of 1538 bytes carry 1448."""


SEGMENT, LEAST_SEGMENT, SEGMENT_SECONDS = 256 << 10, 16 << 10, 4e-3
"""Bytes that are sent at once, and on slow links the least of them, and their time."""
FAR = 1e-3
"""Seconds of a round trip from which on nodes count as far."""
WINDOW = 2 * (2 << 20)
"""Bytes to one peer that can be under way on two TCP streams (PYCOMM_SOCKETS): half of the largest
buffer that Linux gives a socket (`tcp_wmem`), since the other half is bookkeeping."""


@dataclass(frozen=True)
class Link:
    """A full-duplex link: one of each node, or, inside a node, one of each rank."""

    name: str
    rate: float
    """Bytes per second in each direction."""
    latency: float
    """Seconds from a send to the arrival of an empty message."""
    message: float = 0.0
    """Seconds of a processor to send and to receive one message."""
    byte: float = 0.0
    """Seconds of a processor to send and to receive one byte; 0 where a device does it."""
    burst: float = 0.0
    """Bytes that pass at once after a pause, as with a token bucket."""
    receive: float = 0.0
    """Bytes per second that a node receives, if not `rate`."""
    loss: float = 0.0
    """Share of packets that are lost; the rates are what it leaves."""
    far: bool = False
    """True if a round trip takes `FAR` or longer."""
    window: float = 0.0
    """Bytes to one peer that can be under way; 0: any number, or the rate has been measured."""

    @property
    def slower(self) -> float:
        """The rate of the slower direction: all-reduces send what they receive."""
        return min(self.rate, self.receive or self.rate)

    def reached(self, peers: int) -> float:
        """Return the rate that a node reaches with so many peers: a window each in a round trip."""
        if self.window == 0 or self.latency == 0:
            return self.slower
        return min(self.slower, peers * self.window / (2 * self.latency))

    @property
    def segment(self) -> int:
        """Bytes that are sent at once; fewer on slow links between far nodes (`select.cpp`)."""
        if not self.far:
            return SEGMENT
        return max(LEAST_SEGMENT, min(SEGMENT, round(SEGMENT_SECONDS * self.slower)))

    def late(self, messages: float) -> float:
        """Return the seconds by which the last of so many messages is later on average: each of
        them is repeated after a round trip if its last packet is lost."""
        return 2 * self.latency * float(1 - (1 - self.loss) ** messages)

    @classmethod
    def of(cls, text: str, *, mover: Mover = "tcp") -> Link:
        """Return a preset ("10gbe", "nvlink", "wan"), or a link of a rate ("1gbit", "3GB/s").

        A rate in bits is that of the line, of which headers take 5 %; one in bytes is what
        arrives. A prefix says what moves the bytes: "tcp:40gbit" a core, "dma:40gbit" a device.
        TCP is taken to go on at the link's rate in spite of losses, as bbr does.

        Args:
            text: what a node sends, and receives if that differs; then, in any order and each if
                wanted, the round trip and the share of packets that are lost at random:
                "20mbit/50mbit,60ms,0.1%".
            mover: what moves the bytes of a rate without a prefix.

        Raises:
            ValueError: a part is no preset, rate, time or share below 1.
        """
        first, *rest = text.split(",")
        latency, loss = None, 0.0
        for part in rest:
            if part.strip().endswith("%"):
                loss = units.parse_share(part)
            else:
                latency = units.parse_time(part) / 2
        send, slash, receive = first.partition("/") if "B/s" not in first else (first, "", "")
        link = _plain(send, latency, mover)
        if slash:
            link = replace(link, name=first, receive=_plain(receive, latency, mover).rate)
        if loss == 1:
            raise ValueError(f"cannot read the link {text!r}: want a loss below 100 %")
        return replace(
            link, rate=(1 - loss) * link.rate, receive=(1 - loss) * link.receive, loss=loss
        )


LATENCIES: dict[str, float] = {"tcp": 50e-6, "dma": 5e-6}
"""Seconds from a send to its arrival, for links of which only the rate is known."""


def _plain(text: str, latency: float | None, mover: Mover) -> Link:
    """Return a preset, or a link of a rate, with another latency if one is given."""
    known = LINKS.get(text.lower())
    if known is None:
        prefix, _, number = text.rpartition(":")
        if prefix and prefix not in LATENCIES:
            raise ValueError(
                f"cannot read the link {text!r}: before a rate stands {', '.join(LATENCIES)}"
            )
        try:
            rate, bits = units.parse_rate(number)
        except ValueError as error:
            raise ValueError(f"{error}; or one of {', '.join(LINKS)}") from None
        kind = prefix or mover
        known = Link(text, rate * (GOODPUT if bits else 1.0), LATENCIES[kind])
        if kind == "tcp":
            known = _over_tcp(text, known.rate, known.latency)
    latency = known.latency if latency is None else latency
    return replace(known, latency=latency, far=latency >= FAR / 2)


def _over_tcp(name: str, rate: float, latency: float) -> Link:
    return Link(name, rate, latency, message=8e-6, byte=0.8e-9, window=WINDOW)


LINKS: dict[str, Link] = {
    "wan": _over_tcp("wan", GOODPUT * 100e6 / 8, 20e-3),
    "1gbe": _over_tcp("1gbe", GOODPUT * 1e9 / 8, 50e-6),
    "10gbe": _over_tcp("10gbe", GOODPUT * 10e9 / 8, 30e-6),
    "25gbe": _over_tcp("25gbe", GOODPUT * 25e9 / 8, 20e-6),
    "100gbe": Link("100gbe", GOODPUT * 100e9 / 8, 10e-6),  # RDMA: the card moves the bytes
    "pcie4": Link("pcie4", 22e9, 5e-6),  # between GPUs with peer access
    "nvlink": Link("nvlink", 400e9, 3e-6),
    "shm": Link("shm", 8e9, 1e-6),
}


@dataclass(frozen=True)
class CodecRates:
    """Throughput of one core, or one device, with a codec: float32 bytes per second."""

    encode: float
    decode: float
    decode_add: float
    encode_fed: float
    """Encoding with error feedback, which also reads and writes a residual."""

    def times(self, factor: float) -> CodecRates:
        """Return all rates multiplied by a factor."""
        return CodecRates(*(factor * rate for rate in astuple(self)))

    def toward(self, other: CodecRates, share: float) -> CodecRates:
        """Return rates between the two: `share` of the way to `other`, in seconds per byte."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return CodecRates(*(1 / ((1 - share) / mine + share / its) for mine, its in pairs))


@dataclass(frozen=True)
class Processor:
    """The core or device that encodes, adds and decodes."""

    name: str
    memory: float
    """Bytes per second that a pass over memory reads and writes."""
    rates: Mapping[str, CodecRates] = field(default_factory=dict)
    """Measured rates of codecs, by name."""
    is_core: bool = True
    """True for a core of a CPU; else a device whose memory bounds codecs."""
    far: Processor | None = None
    """The same processor when no cache holds the buffers."""
    span: tuple[float, float] = (0.0, 0.0)
    """Bytes of buffers per machine to which these rates apply, and to which the far ones do."""

    def at(self, footprint: float) -> Processor:
        """Return the processor at `footprint` bytes of buffers, interpolated by their logarithm."""
        if self.far is None:
            return self
        low, high = self.span
        share = min(1.0, max(0.0, math.log(footprint / low) / math.log(high / low)))
        memory = 1 / ((1 - share) / self.memory + share / self.far.memory)
        known = self.rates.keys() & self.far.rates.keys()
        rates = {name: self.rates[name].toward(self.far.rates[name], share) for name in known}
        return replace(self, memory=memory, rates=rates, far=None)

    def fed(self, name: str, rates: CodecRates) -> Processor:
        """Return the processor with a codec's encoding at its rate with error feedback."""
        mine = self.rates.get(name, rates)
        known = {**self.rates, name: replace(mine, encode=mine.encode_fed)}
        return replace(self, rates=known, far=self.far and self.far.fed(name, rates))


# Bandwidths of a server's core, and of an accelerator with HBM of which kernels reach 60 %.
PROCESSORS = {
    "core": Processor("core", 16e9),
    "gpu": Processor("gpu", 1.2e12, is_core=False),
}


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes of equal size."""

    ranks: int
    inter: Link
    """Link between nodes, which the ranks of a node share."""
    ranks_per_node: int = 1
    intra: Link = LINKS["shm"]
    processor: Processor = PROCESSORS["core"]
    cores: float = 2.0
    """Cores per rank. With less than 2, a rank's communication slows its computing."""
    compute_on_cores: bool = False
    """True if training runs on these cores, too, and not on a device of its own."""
    ranks_per_machine: int = 0
    """Ranks that share cores; 0: those of a node; more if nodes are namespaces of one machine."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ValueError("a cluster and each of its nodes have at least one rank: give more")
        if self.ranks % self.ranks_per_node:
            raise ValueError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}: choose a multiple"
            )
        if not 0 < self.cores < math.inf:
            raise ValueError(f"{self.cores} cores: want a number above 0")

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def machine(self) -> int:
        """Number of ranks that share cores."""
        return self.ranks_per_machine or self.ranks_per_node

    @property
    def levels(self) -> bool:
        """True if there are several nodes of several ranks."""
        return self.nodes > 1 and self.ranks_per_node > 1

    @property
    def slowest(self) -> Link:
        """The link that limits an algorithm without levels."""
        return self.inter if self.nodes > 1 else self.intra

    def holding(self, values: float) -> Cluster:
        """Return the cluster while every rank works on a buffer of `values` float32."""
        if self.processor.far is None:
            return self
        footprint = 4.0 * max(1.0, values) * self.machine
        return replace(self, processor=self.processor.at(footprint))

    @property
    def slowdown(self) -> float:
        """Factor by which work takes longer because ranks wait for each other's cores."""
        return max(1.0, 1.0 / self.cores)
