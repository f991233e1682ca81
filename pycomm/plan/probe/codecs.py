"""Measurements of codecs on a core, alone and in an all-reduce."""

from __future__ import annotations

import array
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.plan.algorithms import Size, all_reduce
from pycomm.plan.cluster import Cluster, CodecRates, Link, Processor
from pycomm.plan.codecs import CODINGS, Coding
from pycomm.plan.probe.ranks import Ranks, coded_all_reduces

REPEAT = 0.045  # seconds of each measurement of a codec
TILE = (1 << 20) + 7  # random values that longer buffers repeat
SHORT = 1 << 20  # values that an all-reduce takes a few milliseconds for
QUICK = 3  # number of codecs whose all-reduces show how long a round waits


@dataclass(frozen=True)
class Codecs:
    """Rates of a core on buffers of one size."""

    numel: int
    memory: float
    rates: dict[str, CodecRates]
    late: float = 0.0
    """Seconds that a round of an all-reduce takes beyond what links and cores explain."""


class Buffers:
    """Normal values by a seed, buffers for output and residual, and a payload."""

    def __init__(self, numel: int, seed: int) -> None:
        self.numel = numel
        self.values, self.out = _values(numel, seed), array.array("f", bytes(4 * numel))
        self.residual, self.payload = array.array("f", bytes(4 * numel)), bytearray()

    def memory(self) -> float:
        """Return the bytes per second that a sum of two arrays reads."""
        source, target = (_C.buffer(b, False)[0] for b in (self.values, self.out))
        dtype, op = _C.DType.float32, _C.ReduceOp.sum
        seconds = _seconds(
            lambda: _C.reduce(dtype, op, [source, target], target, self.numel), REPEAT
        )
        return 8 * self.numel / seconds

    def rates(self, codec: _C.Codec, budget: float) -> CodecRates:
        """Return the rates of a codec's calls; each measurement takes `budget` seconds."""
        numel = self.numel
        if len(self.payload) < codec.encoded_bytes(numel):
            self.payload = bytearray(codec.encoded_bytes(numel))
        buffers = self.values, self.out, self.payload, self.residual
        source, target, code, residual = (_C.buffer(b, False)[0] for b in buffers)
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda: codec.encode(source, numel, code),
            "decode": lambda: codec.decode(code, target, numel),
            "decode_add": lambda: codec.decode_add(code, target, numel),
            "encode_fed": lambda: codec.encode(source, numel, code, error=(residual, residual)),
        }
        rates = {name: 4 * numel / _seconds(call, budget) for name, call in calls.items()}
        return CodecRates(**rates)


def measure(ranks: Ranks, buffers: Buffers, effort: float, *, busy: bool) -> Codecs:
    """Measure all codecs, at the same time on all ranks that are `busy`; the others wait."""
    rates = {}
    for coding in CODINGS.values():
        if coding.spec:
            ranks.rest()
            if busy:
                rates[coding.name] = buffers.rates(_C.Codec(coding.spec), REPEAT * effort)
    return Codecs(buffers.numel, buffers.memory(), rates)


def in_use(
    group: Communicator, link: Link, found: Codecs, buffers: Buffers, effort: float
) -> Codecs:
    """Correct the codecs' rates by the core time that an all-reduce takes beyond, or below, theirs.

    An all-reduce works on segments, which fit caches where the buffer does not, so it may be
    faster overall; extra time arises after a message has arrived, so it is added to decoding. Long
    buffers are limited to what the link sends without a codec in half a second.
    """
    longest = int(link.rate * 0.5 * effort) // 4 >> 16 << 16
    numel = max(1 << 16, min(found.numel, longest))
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in found.rates}
    for _ in range(3 if numel <= SHORT else 1):
        for name, times in took.items():  # in turns, so each starts with the others' cache contents
            times.append(coded_all_reduces(group, buffers.values, numel, CODINGS[name], 1))
    rates, seen = dict(found.rates), []
    for name, known in found.rates.items():
        coding = CODINGS[name]
        cluster = Cluster(2, link, processor=Processor("probed", found.memory, found.rates))
        wall, core = (statistics.median(part) for part in zip(*took[name], strict=True))
        codec, others = spent(cluster, coding, numel)
        if core < codec + others:
            rates[name] = known.times(min(5.0, codec / max(core - others, 1e-9)))
        else:
            decodings = 1.0 if coding.whole else 1.5  # of the whole buffer, between two ranks
            decode = 1 / known.decode + (core - others - codec) / decodings / (4 * numel)
            rates[name] = replace(known, decode=1 / decode)
        cluster = replace(cluster, processor=Processor("probed", found.memory, rates))
        cost = all_reduce(cluster, coding, way(coding), Size.of(numel, coding))
        if not coding.whole:  # its one round is a small part of the time
            seen.append((wall, (wall - cost.seconds) / 2))
    # Only the quickest count: a small error in a link's long time exceeds the wait of a round.
    late = statistics.median(beyond for _, beyond in sorted(seen)[:QUICK])
    return replace(found, rates=rates, late=late)


def way(coding: Coding) -> str:
    """Return the algorithm of a codec's all-reduces among few ranks."""
    return "gather" if coding.combine == "gather" else "two_shot"


def spent(cluster: Cluster, coding: Coding, numel: int) -> tuple[float, float]:
    """Return a core's predicted seconds in an all-reduce: for the codec, and for the rest."""
    size, processor = Size.of(numel, coding), cluster.processor
    free = replace(processor, rates={coding.name: processor.rates[coding.name].times(1e6)})
    others = all_reduce(replace(cluster, processor=free), coding, way(coding), size).processor
    return all_reduce(cluster, coding, way(coding), size).processor - others, others


def _values(numel: int, seed: int) -> array.array[float]:
    """Return normally distributed float32.

    Values beyond a tile repeat it at an odd distance, so a codec that samples at a fixed stride
    sees all of it.
    """
    tile = array.array("f", NormalDist().samples(min(numel, TILE), seed=seed))
    return (tile * -(-numel // len(tile)))[:numel]


def _seconds(call: Callable[[], object], budget: float) -> float:
    """Return the core seconds of one call."""
    call()
    samples: list[float] = []
    while not samples or sum(samples) < budget:
        begin = time.thread_time()
        call()
        samples.append(time.thread_time() - begin)
    return statistics.median(samples)
